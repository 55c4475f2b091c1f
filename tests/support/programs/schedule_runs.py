"""Runs `sinkprune-calibrate schedule` without repeated measurements."""

from __future__ import annotations

import re
from dataclasses import replace

from support.programs.commands import Outcome, run


def schedule(*arguments: object) -> Outcome:
    """Return the outcome, without the lines on drawn scenes and on whether the costs were kept."""
    outcome = run("sinkprune-calibrate", "schedule", *arguments, "--seconds", 0)
    usual = r"^(note: \d drawn scenes|note: the costs are kept in|warning: the costs, with the times of recent) .*\n"
    return replace(outcome, stderr=re.sub(usual, "", outcome.stderr, flags=re.MULTILINE))
