"""The parser of every command: its usage line, `--version`, and `--json` with an optional file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from sinkprune import __version__
from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.command_line.command import naming_stdout
from sinkprune.contract.command_line.json_output import STDOUT

Options = TypeVar("Options")
_ALIKE = 0.7
"""The least ratio of `get_close_matches` at which an unknown option may be a misspelt one."""


class PathOrName(str):
    """The type of an argument that is a path or a name, for example of a checkpoint on a hub."""


class CommandParser(argparse.ArgumentParser):
    """A parser with `--help` and `--version`; `prog` is the command's name in usage lines, as in `sinkprune run`."""

    def __init__(self, prog: str, description: str, examples: str) -> None:
        super().__init__(
            prog=_as_started(prog),
            description=description,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        version = f"sinkprune {__version__}"
        self._words: list[str] = []
        self.add_argument("--version", action="version", version=version, help="print the version and exit")

    def add_json(self, content: str) -> None:
        """Add `--json [FILE]`, the `json_path` of `json_output` in this package; `content` is for the help.

        A positional after a bare `--json` would be its file, as with any optional value of argparse.
        """
        self.add_argument(
            "--json",
            nargs="?",
            const=STDOUT,
            type=Path,
            metavar="FILE.json",
            help=f"write {content} as JSON; without FILE.json, or with -, print the JSON and nothing else. "
            "A bare --json comes last",
        )

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2 and one message, which suggests the option that was meant."""
        shown = {name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS}
        # Without the dashes, which make short names alike.
        names = [name.removeprefix("--") for name in shown if name.startswith("--")]
        # A misspelt option that is required counts as missing.
        missing = message.startswith("the following arguments are required")
        unknown = message.split() if message.startswith("unrecognized arguments") else self._words * missing
        words = [
            word.partition("=")[0].removeprefix("--")
            for word in unknown
            if word.startswith("--") and not self._is_option(word)
        ]
        near = [(word, found) for word in words for found in get_close_matches(word, names, 1, _ALIKE)]
        meant = f" Did you mean --{near[0][1]}{f' by --{near[0][0]}' * missing}?" if near else ""
        self.exit(2, f"error: {escaped(message + '.' + meant)} See {self.prog} --help.\n")

    def parse(self, arguments: Sequence[str] | None, kind: type[Options]) -> Options:
        """Return the options in `arguments`, or the process's own if None, as a dataclass with a field for each."""
        return kind(**vars(self.parse_args(arguments)))

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does, and keep the words for `error`."""
        self._words = [*(sys.argv[1:] if args is None else args)]
        return super().parse_known_args(self._words, namespace)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print as argparse does, but raise `OSError` for a help or a version that standard output does not take."""
        if file is not sys.stdout:
            super()._print_message(message, file)
            return
        with naming_stdout():
            file.write(message)
            file.flush()

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Reject an empty path: it means the current folder, which nobody named."""
        if not arg_string and action.type in (Path, PathOrName):
            raise argparse.ArgumentError(action, "it is empty, as an unset shell variable is; expected a path")
        return super()._get_value(action, arg_string)

    def _is_option(self, word: str) -> bool:
        """Return whether the word is an option, abbreviated or not, maybe with a value."""
        return any(name.startswith(word.partition("=")[0]) for name in self._option_string_actions)


def _as_started(prog: str) -> str:
    """Return `sinkprune run` as `sinkprune-run` in a process that was started by that name."""
    script = Path(sys.argv[0]).name
    verbs = script.replace("-", " ")
    return script + prog.removeprefix(verbs) if f"{prog} ".startswith(f"{verbs} ") else prog
