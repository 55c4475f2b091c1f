"""The commands, as their scripts call them. Importing this loads nothing that takes time; `start` loads the rest."""

from __future__ import annotations

from sinkprune.contract.command_line.command import start

_COMMAND = "sinkprune.command"


def sinkprune() -> int:
    """`sinkprune VERB`: every command under one name; returns the exit code."""
    return start(_COMMAND)


def export() -> int:
    """`sinkprune-export`: a checkpoint in, a bundle out; returns the exit code."""
    return start(_COMMAND, "export")


def build() -> int:
    """`sinkprune-build`: a bundle in, engines out; returns the exit code."""
    return start(_COMMAND, "build")


def check() -> int:
    """`sinkprune-check`: engines beside the graphs they were built of; returns the exit code."""
    return start(_COMMAND, "check")


def run() -> int:
    """`sinkprune-run`: ask a bundle about an image; returns the exit code."""
    return start(_COMMAND, "run")


def profile() -> int:
    """`sinkprune-profile`: every budget against the unpruned engines; returns the exit code."""
    return start(_COMMAND, "profile")


def calibrate() -> int:
    """`sinkprune-calibrate`: what a vision tower's tokens are like; returns the exit code."""
    return start(_COMMAND, "calibrate")


def evaluate() -> int:
    """`sinkprune-evaluate`: how much accuracy each method keeps at each budget; returns the exit code."""
    return start(_COMMAND, "evaluate")


def doctor() -> int:
    """`sinkprune-doctor`: what this machine is, what fits it, and what to run next; returns the exit code."""
    return start(_COMMAND, "doctor")
