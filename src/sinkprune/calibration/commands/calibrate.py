"""`sinkprune-calibrate`: measures a model on a user's pictures and prompts, and quantises it for them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sinkprune.contract.command_line.options import Verb, run_verb

_COMMANDS = "sinkprune.calibration.commands"
VERBS = {
    "norms": Verb(f"{_COMMANDS}.norms", "measure token norms: are there outliers, and how many?"),
    "attention": Verb(f"{_COMMANDS}.attention", "count sink tokens among the kept, and measure attention"),
    "quantize": Verb(f"{_COMMANDS}.quantize", "store weights in 4 or 8 bits, rounded for your pictures"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `sinkprune-calibrate` with `arguments`, or the process's own if None; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    description = "Measure a model on your pictures and prompts, and quantise it for them."
    return run_verb("sinkprune calibrate", description, VERBS, words)
