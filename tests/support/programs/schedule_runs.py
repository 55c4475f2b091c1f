"""Runs `sinkprune-calibrate schedule` without repeated measurements."""

from __future__ import annotations

from support.programs.commands import Outcome, run


def schedule(*arguments: object) -> Outcome:
    return run("sinkprune-calibrate", "schedule", *arguments, "--seconds", 0)
