"""Verbs, options and results of commands.

`json_path` is the value of `--json` (`CommandParser.add_json`): a file, `STDOUT`, or None without the option.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, get_args

from sinkprune import __version__
from sinkprune.contract.checks import escaped, format_value, unknown_name
from sinkprune.contract.command_line.command import naming_stdout, run_command
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.output_files import OutputFile, write_whole
from sinkprune.contract.progress import OnProgress


class Verb(NamedTuple):
    """A word that selects a command."""

    module: str
    """The module whose `main(arguments)` runs it."""
    summary: str
    """One line of help."""


def run_verb(prog: str, description: str, verbs: Mapping[str, Verb], words: Sequence[str]) -> int:
    """Run the verb in the first of `words` with the other words, and return the exit code.

    Without a verb, `--help` prints all `verbs` and `--version` the version. Both raise `SystemExit`, and so does a
    call without words, with exit code 2.
    """
    # The verb's own parser would print the same, but importing its module may take a second.
    if words[1:2] == ["--version"]:
        words = words[1:]
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if words and words[0] in verbs:
        return import_module(verbs[words[0]].module).main(words[1:])
    return run_command(lambda given: _explain(prog, description, verbs, given or ()), words)


def _explain(prog: str, description: str, verbs: Mapping[str, Verb], words: Sequence[str]) -> None:
    """Print the help or the version. Raises `UsageError` for words that name no verb."""
    if words and not words[0].startswith("-"):
        raise UsageError(
            unknown_name(f"{prog} has no verb {format_value(words[0])}", words[0], verbs, "Its verbs are")
        )
    width = max(map(len, verbs))
    listed = "".join(f"  {name:{width}}  {verb.summary}\n" for name, verb in verbs.items())
    parser = CommandParser(prog, description, f"verbs:\n{listed}\n`{prog} VERB --help` lists the options of a verb.")
    parser.add_argument("verb", metavar="VERB", help="the verb, followed by its options")
    if not words:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    parser.parse_args(words)


def write_output(path: Path, data: bytes) -> None:
    """Write a file that an option of a command names, as `write_whole` does, and print that it is written.

    Raises `OutputError`.
    """
    write_whole(path, data)
    note_written(path)


def write_each(*writers: Callable[[], object]) -> None:
    """Call the writers of a command's results in order, also after one has failed; then raise the first error.

    So what took minutes to measure reaches the terminal if the disk is full, and the files if the terminal is closed
    or a picture cannot be drawn.
    """
    errors: list[Exception] = []
    for write in writers:
        try:
            write()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def note_written(path: Path) -> None:
    """Print a line on stderr about a file or folder that a command wrote."""
    # The file is there, also where stderr is closed.
    with suppress(OSError):
        sys.stderr.write(f"wrote {escaped(str(path))}\n")


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


Options = TypeVar("Options")
_ALIKE = 0.7
"""The least ratio of `get_close_matches` at which an unknown option may be a misspelt one."""


Group = Literal["picture and question", "budget", "answer", "measurement", "backend", "trust", "output"]
"""The titles of options in `--help`, in their order."""


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
        self._groups = {title: self.add_argument_group(title) for title in get_args(Group)}
        # Options without a group come before those of the backend.
        self._action_groups.insert(-3, self._action_groups.pop(1))
        self.add_argument("--version", action="version", version=version, help="print the version and exit")

    def group(self, title: Group) -> argparse._ArgumentGroup:
        """Return the group of options with this title, to which `add_argument` adds."""
        return self._groups[title]

    def format_help(self) -> str:
        """Format as argparse does, with options in the usage line as they are listed, after those without a group."""
        groups = [self._optionals, *self._groups.values(), self._positionals]
        places = {id(action): place for place, group in enumerate(groups) for action in group._group_actions}
        self._actions.sort(key=lambda action: places[id(action)])
        return super().format_help()

    def add_json(self, content: str) -> None:
        """Add `--json [FILE]`, the `json_path` of this module; `content` is for the help.

        A positional after a bare `--json` would be its file, as with any optional value of argparse.
        """
        self.group("output").add_argument(
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
        self.exit(2, f"error: {escaped(message.removesuffix('.') + '.' + meant)} See {self.prog} --help.\n")

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

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Reject a value that is no choice of an option, with the one that was meant."""
        if action.choices is not None and value not in action.choices:
            found, choices = f"invalid choice: {format_value(value)}", map(str, action.choices)
            raise argparse.ArgumentError(action, unknown_name(found, value, choices, "Choices are"))

    def _is_option(self, word: str) -> bool:
        """Return whether the word is an option, abbreviated or not, maybe with a value."""
        return any(name.startswith(word.partition("=")[0]) for name in self._option_string_actions)


def _as_started(prog: str) -> str:
    """Return `sinkprune run` as `sinkprune-run` in a process that was started by that name."""
    script = Path(sys.argv[0]).name
    verbs = script.replace("-", " ")
    return script + prog.removeprefix(verbs) if f"{prog} ".startswith(f"{verbs} ") else prog
