"""The parser of every command: its usage line, `--version`, and a `--json` whose file may be left out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sinkprune import __version__
from sinkprune.contract.command_line.json_output import STDOUT, SUFFIX


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
        self.add_argument("--version", action="version", version=version, help="print the version and exit")

    def add_json(self, content: str) -> None:
        """Add `--json [FILE]`, which `json_output` in this package reads; `content` names what the JSON holds."""
        self.add_argument(
            "--json",
            nargs="?",
            const=STDOUT,
            type=Path,
            metavar="FILE.json",
            help=f"write {content} as JSON; without FILE.json, or with -, print the JSON and nothing else",
        )

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does, except that an option that needs no value leaves a word to a positional."""
        words = [*(sys.argv[1:] if args is None else args)]
        end = words.index("--") if "--" in words else len(words)
        for action in self._actions:
            for place in range(end) if action.nargs == "?" else ():
                following = words[place + 1] if place + 1 < end else ""
                if _is_option(words[place], action) and not _is_value(following, action):
                    words[place] = f"{action.option_strings[0]}={action.const}"
        return super().parse_known_args(words, namespace)


def _is_option(word: str, action: argparse.Action) -> bool:
    """Whether the word is the option, abbreviated or not, with no value behind a `=`."""
    return len(word) > 2 and any(option.startswith(word) for option in action.option_strings)


def _is_value(word: str, action: argparse.Action) -> bool:
    """Whether the word can be the option's value: one of its choices, or else the name of a file of JSON."""
    if action.choices:
        return word in action.choices
    return word == str(STDOUT) or (Path(word).suffix.lower() == SUFFIX and not Path(word).is_dir())
