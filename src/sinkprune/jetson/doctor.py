"""`sinkprune-doctor`: describes this machine or a board, what fits it, and what to run next."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from sinkprune.contract.checks import WholeNumber, to_json
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import CommandParser, PathOrName, json_outputs, write_result
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.jetson.boards import read_boards, read_presets
from sinkprune.jetson.host import SystemFiles, read_machine, this_environment
from sinkprune.jetson.report import Query, print_report, report_on_board, report_on_machine
from sinkprune.runtime.backends.known import KNOWN, on_cpu

_EXAMPLES = """\
examples:
  sinkprune-doctor                                       # this machine, and which presets fit
  sinkprune-doctor llava-7b llava-7b-int4                # which of these bundles fit, and what to run next
  sinkprune-doctor --board orin-nano-8gb                 # needs and bounds on a board, from anywhere
  sinkprune-doctor --board agx-orin-64gb qwen2.5-vl-7b --picture 1280x720
  sinkprune-doctor --json > machine.json

Bounds come from datasheets, not from measurements; memory on boards is an estimate: docs/doctor.md.
"""
_SIDE = WholeNumber("a side of --picture", 1, 16384)


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    boards = read_boards()
    options = _parser(", ".join(boards.boards), ", ".join(read_presets())).parse_args(arguments)
    check_outputs(json_outputs(options.json), folders=map(Path, options.models))
    query = Query(tuple(options.models), _size(options.picture), options.backend)
    if options.board is not None:
        report = report_on_board(options.board, boards, query)
    else:
        with status("looking at this machine"):
            files = SystemFiles(options.root)
            machine = read_machine(files, this_environment(), boards, Path())
            report = report_on_machine(machine, boards, query)
    write_result(options.json, to_json(report), lambda: print_report(report))


def _size(words: str) -> tuple[int, int]:
    """Return width and height of words like 640x480. Raises `UsageError`."""
    found = re.fullmatch(r"(\d+)x(\d+)", words)
    if found is None:
        raise UsageError(f"--picture is '{words}', expected width and height in pixels, as in 640x480.")
    return _SIDE(found[1]), _SIDE(found[2])


def _cpu_backend(name: str) -> str:
    """Return the name; raises `UsageError` for a backend that is no CPU's."""
    if name in KNOWN and KNOWN[name].on_gpu:
        raise UsageError(
            f"--backend is '{name}', expected a library for CPUs: {', '.join(on_cpu())}. For TensorRT leave it "
            "out on the board, or give --board NAME on any machine; sinkprune-profile measures any other library."
        )
    return name


def _parser(boards: str, presets: str) -> CommandParser:
    parser = CommandParser(
        "sinkprune doctor",
        "Report on this machine, or on a Jetson board: which models fit, with which weights and budget, "
        "what to fix first, and what to run next.",
        f"{_EXAMPLES}\nboards:\n  {boards}\npresets:\n  {presets}\n",
    )
    add = parser.add_argument
    add(
        "models",
        type=PathOrName,
        nargs="*",
        metavar="MODEL",
        help="a folder of a bundle or of engines, or a preset (default: every preset)",
    )
    add("--board", metavar="NAME", help="report on this board instead of this machine")
    add("--picture", default="640x480", metavar="WxH", help="size of the image in a request (default: 640x480)")
    add(
        "--backend",
        type=_cpu_backend,
        choices=on_cpu(),
        help="engine library (default: tensorrt on a board, else the installed one)",
    )
    parser.add_json("the whole report")
    # A recorded tree of a system's files, in place of this machine's.
    add("--root", type=Path, default=Path("/"), help=argparse.SUPPRESS)
    return parser
