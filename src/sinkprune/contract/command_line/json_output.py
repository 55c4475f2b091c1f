"""What `--json` means in every command: `-` prints the JSON on standard output, a path writes a file.

`options` are what a `CommandParser` with `add_json` has parsed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sinkprune.contract.files.output_files import Output, write_whole

STDOUT = Path("-")
"""The value of `--json` that prints."""
SUFFIX = ".json"
"""The ending of a file that `--json` writes."""


def prints_json(options: argparse.Namespace) -> bool:
    """Return whether standard output is for the JSON alone: text for people is left out."""
    return bool(options.json == STDOUT)


def json_outputs(options: argparse.Namespace) -> list[Output]:
    """Return the file that `write_json` will write, for `check_outputs`; none where the JSON is printed."""
    return [] if options.json is None or prints_json(options) else [(options.json, (SUFFIX,))]


def write_json(options: argparse.Namespace, value: object) -> None:
    """Write `value` to where `--json` wants it: one line on standard output, or a whole, indented file.

    Does nothing without `--json`. Raises `BrokenPipeError` if nobody reads standard output any more.
    """
    if prints_json(options):
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()
    elif options.json is not None:
        write_whole(options.json, (json.dumps(value, indent=1) + "\n").encode())
