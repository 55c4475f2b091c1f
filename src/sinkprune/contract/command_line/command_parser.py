"""The parser of every command: its usage line, `--version`, and a `--json` whose file may be left out."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from sinkprune import __version__
from sinkprune.contract.command_line.json_output import STDOUT, SUFFIX

Options = TypeVar("Options")
_JSON = "--json"


class CommandParser(argparse.ArgumentParser):
    """A parser with `--help` and `--version`; `prog` is what usage lines call the command, as in `sinkprune run`."""

    def __init__(self, prog: str, description: str, examples: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        version = f"sinkprune {__version__}"
        self._takes_json = False
        self.add_argument("--version", action="version", version=version, help="print the version and exit")

    def add_json(self, content: str) -> None:
        """Add `--json [FILE]`, which `json_output` in this package reads; `content` names what the JSON holds."""
        self._takes_json = True
        self.add_argument(
            _JSON,
            nargs="?",
            const=STDOUT,
            type=Path,
            metavar="FILE.json",
            help=f"write {content} as JSON; without FILE.json, or with -, print the JSON and nothing else",
        )

    def parse(self, arguments: Sequence[str] | None, kind: type[Options]) -> Options:
        """Return the options in `arguments`, or the process's own if None, as a dataclass with a field for each."""
        return kind(**vars(self.parse_args(arguments)))

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does, except that an option that needs no value leaves a word to a positional."""
        words = [*(sys.argv[1:] if args is None else args)]
        for action in self._actions:
            filled = _without_value(words, action) if action.nargs == "?" and action.choices else words
            if filled != words and self._accepts(filled):
                words = filled
        place = _place_of_json(words) if self._takes_json else None
        if place is None:
            return super().parse_known_args(words, namespace)
        before, after = words[:place], words[place + 1 :]
        readings = [[*before, f"{_JSON}={STDOUT}", *after]]
        if after and (after[0] == str(STDOUT) or not after[0].startswith("-")):
            file_reading = [*before, f"{_JSON}={after[0]}", *after[1:]]
            readings.insert(0 if _is_file_name(after[0]) else 1, file_reading)
        # `--json BUNDLE` and `--json FILE BUNDLE` differ in nothing but what is left for BUNDLE.
        chosen = next((reading for reading in readings if self._accepts(reading)), readings[0])
        return self.parse_known_args(chosen, namespace)

    def _accepts(self, words: Sequence[str]) -> bool:
        """Return whether `words` parse, tried on a copy that raises where this parser would end the process."""

        def refuse(message: str) -> NoReturn:
            raise argparse.ArgumentError(None, message)

        trial = copy.copy(self)
        trial.error = refuse  # type: ignore[method-assign]
        try:
            trial.parse_args(words)
        except argparse.ArgumentError:
            return False
        return True


def _without_value(words: Sequence[str], option: argparse.Action) -> list[str]:
    """Return `words` in which an `option` that none of its choices follows has the value that stands for none."""
    choices = [*map(str, option.choices or ())]
    following = [*words[1:], ""]
    return [
        f"{word}={option.const}" if word in option.option_strings and after not in choices else word
        for word, after in zip(words, following, strict=True)
    ]


def _place_of_json(words: Sequence[str]) -> int | None:
    """Return the index of the first `--json` that has no `=FILE`, abbreviated or not."""
    options = words[: words.index("--")] if "--" in words else words
    return next((place for place, word in enumerate(options) if len(word) > 2 and _JSON.startswith(word)), None)


def _is_file_name(word: str) -> bool:
    return word == str(STDOUT) or (Path(word).suffix.lower() == SUFFIX and not Path(word).is_dir())
