"""The commands, as their scripts call them. Importing this loads nothing that takes time; `start` loads the rest."""

from __future__ import annotations

from sinkprune.contract.command import start


def export() -> int:
    """`sinkprune-export`: a checkpoint in, a bundle out; returns the exit code."""
    return start("sinkprune.export.command")


def build() -> int:
    """`sinkprune-build`: a bundle in, engines out; returns the exit code."""
    return start("sinkprune.engines.command")


def check() -> int:
    """`sinkprune-check`: engines beside the graphs they were built of; returns the exit code."""
    return start("sinkprune.engines.gate.command")


def run() -> int:
    """`sinkprune-run`: ask a bundle about an image; returns the exit code."""
    return start("sinkprune.runtime.commands.run")


def profile() -> int:
    """`sinkprune-profile`: every budget against the unpruned engines; returns the exit code."""
    return start("sinkprune.runtime.commands.profile")


def calibrate() -> int:
    """`sinkprune-calibrate`: what a vision tower's tokens are like; returns the exit code."""
    return start("sinkprune.calibration.commands.calibrate")


def evaluate() -> int:
    """`sinkprune-evaluate`: how much accuracy each method keeps at each budget; returns the exit code."""
    return start("sinkprune.calibration.commands.evaluate")


def doctor() -> int:
    """`sinkprune-doctor`: what this machine is, what fits it, and what to run next; returns the exit code."""
    return start("sinkprune.jetson.commands.doctor")
