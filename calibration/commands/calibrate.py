"""`sinkprune-calibrate`: what pictures and prompts of a user's own tell about a bundle, and what is made of it.

A verb a module; without one it is `norms`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

VERBS = ("norms", "attention", "quantize")
"""Modules of this package by the words that call them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `sinkprune-calibrate` with `arguments`, or the process's own if None; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    verb, rest = (given[0], given[1:]) if given and given[0] in VERBS else (VERBS[0], given)
    code: int = import_module(f"sinkprune.calibration.commands.{verb}").main(rest)
    return code
