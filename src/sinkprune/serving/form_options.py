"""The options of an answer's form, for the commands that answer questions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sinkprune.contract.command_line.options import CommandParser
from sinkprune.runtime.commands.options import Options
from sinkprune.runtime.commands.run import CUT_OFF, RunExtension
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.answer import Answer


def add_form_options(parser: CommandParser) -> None:
    """Add the options of an answer's form; `read_form` reads them."""
    add = parser.group("answer").add_argument
    add("--schema", type=Path, metavar="FILE.json", help="answer in JSON that conforms to the JSON schema in a file")
    add("--regex", metavar="REGEX", help="answer with a text that matches a regular expression")
    add(
        "--choice",
        action="append",
        default=[],
        metavar="TEXT",
        help="answer with the likeliest of these texts; give it twice or more",
    )


def read_form(options: Options, stop: list[str]) -> dict[str, Any]:
    """Return the form as fields of a `Request`; raises `UsageError` for a wrong form, and for more than one."""
    if options.schema is None and options.regex is None and not options.choice:
        return {}
    from sinkprune.runtime.text.answer_form import check_one_form, checked_choices, checked_regex, read_schema

    form = {
        "schema": read_schema(options.schema) if options.schema else None,
        "regex": checked_regex(options.regex),
        "choice": checked_choices(options.choice),
    }
    check_one_form(form, stop)
    return {name: value for name, value in form.items() if value}


class FormOptions(RunExtension):
    """`--schema`, `--regex` and `--choice` of `sinkprune-run`."""

    add_options = staticmethod(add_form_options)

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.reads = options.form_files
        self._form: dict[str, Any] = {}

    def check(self) -> None:
        self._form = read_form(self.options, self.options.stop)

    def fields(self) -> dict[str, Any]:
        return self._form

    def lines(self, answer: Answer) -> str:
        return "".join(f"{share:.3f} {text}\n" for text, share in answer.choices.items())

    def answered(self, pipeline: Pipeline, answer: Answer) -> None:
        if self._form and answer.finish in CUT_OFF:
            from sinkprune.serving.forms import cut_off_line

            sys.stderr.write(cut_off_line(answer))
