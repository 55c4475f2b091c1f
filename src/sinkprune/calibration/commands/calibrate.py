"""`sinkprune-calibrate`: measures a bundle on a user's pictures and prompts, and fits it to them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sinkprune.contract.command_line.verbs import Verb, run_verb

_COMMANDS = "sinkprune.calibration.commands"
VERBS = {
    "norms": Verb(f"{_COMMANDS}.norms", "measure token norms: are there outliers, and how many?"),
    "attention": Verb(f"{_COMMANDS}.attention", "count sink tokens among the kept, and measure attention"),
    "quantize": Verb(f"{_COMMANDS}.quantize", "store weights in 4 or 8 bits, rounded for your pictures"),
    "evidence": Verb(f"{_COMMANDS}.evidence", "find thresholds of methods whose counts vary by picture"),
    "schedule": Verb(f"{_COMMANDS}.schedule", "find a budget that answers in time on this machine"),
}
_OWN_OPTIONS = ("-h", "--help", "--version")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `sinkprune-calibrate` with `arguments`, or the process's own if None; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] not in VERBS and _is_of_norms(words[0]):
        words = ["norms", *words]
    description = (
        "Measure a model on your pictures and prompts, and fit a bundle to them and to this machine. "
        "A bundle in place of the verb runs norms."
    )
    return run_verb("sinkprune calibrate", description, VERBS, words)


def _is_of_norms(word: str) -> bool:
    """Return whether `word` begins a call of `norms` without its name, as in `sinkprune-calibrate BUNDLE`."""
    if word.startswith("-"):
        return word not in _OWN_OPTIONS
    # A word that names nothing is a verb that does not exist; a path that does not exist may be a bundle's.
    return Path(word).exists() or "/" in word
