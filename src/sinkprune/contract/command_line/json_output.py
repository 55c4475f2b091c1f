"""The option `--json` of every command: `-` prints the JSON on standard output, and a path writes a file.

`json_path` is the value of the option, which `CommandParser.add_json` adds; None without `--json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sinkprune.contract.command_line.command import naming_stdout
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.command_line.written_files import write_each, write_output
from sinkprune.contract.files.output_files import OutputFile
from sinkprune.contract.reports.progress import OnProgress

STDOUT = Path("-")
"""The value of `--json` that prints."""


def prints_json(json_path: Path | None) -> bool:
    """Return whether standard output is for the JSON alone, without text for people."""
    return json_path == STDOUT


def json_outputs(json_path: Path | None) -> list[OutputFile]:
    """Return the file that `write_json` will write, for `check_outputs`; empty if the JSON is printed."""
    return [] if json_path is None or prints_json(json_path) else [(json_path, (".json",))]


def write_json(json_path: Path | None, value: object) -> None:
    """Write `value` as one line to standard output, or as a whole, indented file, which a line on stderr names.

    Does nothing without `--json`. Raises `BrokenPipeError` if the reader of standard output has ended.
    """
    if prints_json(json_path):
        with naming_stdout():
            sys.stdout.write(json.dumps(value) + "\n")
            sys.stdout.flush()
    elif json_path is not None:
        write_output(json_path, (json.dumps(value, indent=1) + "\n").encode())


class RunningOutput:
    """What a command prints while it works on, unless `--json` prints.

    Where standard output takes no more, as on a full disk or where its reader has ended as `head` does, it prints
    nothing more, and the work for `--json` and the files that are `still_wanted` goes on until `end`.
    """

    def __init__(self, json_path: Path | None, *still_wanted: Path | None) -> None:
        self._prints = not prints_json(json_path)
        self._goes_on = any((json_path, *still_wanted))
        self._refused: OSError | None = None
        self._shown = ExitStack()

    @contextmanager
    def until_written(self, text: str) -> Iterator[OnProgress]:
        """Show progress as `status` does, until the first text is printed, which then shows how far the work is."""
        with self._shown:
            yield self._shown.enter_context(status(text))

    def write(self, text: str) -> None:
        """Print `text` at once; raises `OSError` where standard output takes no more and no file is wanted."""
        if not self._prints or self._refused:
            return
        self._shown.close()
        try:
            with naming_stdout():
                sys.stdout.write(text)
                sys.stdout.flush()
        except OSError as error:
            if not self._goes_on:
                raise
            self._refused = error

    def end(self) -> None:
        """Raise the error with which standard output took no more, if it did."""
        if self._refused:
            raise self._refused


def write_result(json_path: Path | None, value: object, in_words: Callable[[], object]) -> None:
    """Write a command's result as `write_json` does, and let `in_words` print it, unless the JSON is printed.

    Both are done, also if one fails; then the first error is raised.
    """

    def print_words() -> None:
        with naming_stdout():
            in_words()

    # The words come last, because their reader may stop reading, as `head` does.
    write_each(lambda: write_json(json_path, value), *([] if prints_json(json_path) else [print_words]))
