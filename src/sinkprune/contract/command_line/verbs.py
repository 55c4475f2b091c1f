"""Commands with verbs. The help lists the verbs, and only the module of the chosen verb is imported."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple

from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.command_line.command import run_command
from sinkprune.contract.errors import UsageError


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
    from sinkprune.contract.command_line.command_parser import CommandParser

    if words and not words[0].startswith("-"):
        near = get_close_matches(words[0], verbs, 1)
        guess = f" Did you mean '{near[0]}'?" if near else ""
        raise UsageError(f"{prog} has no verb {format_value(words[0])}. Its verbs are: {', '.join(verbs)}.{guess}")
    width = max(map(len, verbs))
    listed = "".join(f"  {name:{width}}  {verb.summary}\n" for name, verb in verbs.items())
    parser = CommandParser(prog, description, f"verbs:\n{listed}\n`{prog} VERB --help` lists the options of a verb.")
    parser.add_argument("verb", metavar="VERB", help="the verb, followed by its options")
    if not words:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    parser.parse_args(words)
