"""Measures this project and other engines on one machine, in turn, with the same model, words and picture size.

    python benchmarks/peers.py --folder ~/peers-data
    python benchmarks/peers.py --folder ~/peers-data --only openvino-genai,retain-64 --repeat 9 \\
        --json peers.json --plot peers.png

The program makes a checkpoint of true shapes with random weights. Every engine converts it, and each form of it loads
in a process of its own. In every round each form answers about one new random picture while the others sleep. Answers
are noise of a fixed length. The report lists engines that are not installed, do not fit or fail. docs/peers.md
explains the columns and the installation of the engines: `pip install -e '.[peers]'`, and two more steps.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from peer_engines import process
from peer_engines.checkpoint import make_checkpoint, weight_bytes
from peer_engines.engine import ENGINES, Form, NotRunError, engine
from peer_engines.report import ACTIONS, ANSWERS, HEAD, Words, as_json, plot, read_line, table
from peer_engines.rounds import PlainRead, Plan, measure, sittings
from sinkprune.contract.checks import unknown_name
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import json_outputs, write_json
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.output_files import check_outputs, write_whole
from sinkprune.contract.memory import available_bytes
from sinkprune.export.checkpoint.folder import read_json
from sinkprune.export.checkpoint.presets import PRESETS
from sinkprune.runtime.processor import processor_name
from sinkprune.runtime.profiling.plot import PLOT_SUFFIXES, import_matplotlib

# 626 rows with LLaVA's template; no word starts like one of the tokenizer's artificial words.
PROMPT = "What is there on the old chair?"


class Defaults(NamedTuple):
    """What options mean if they are left out, and the words of the table."""

    reference: str = "openvino-genai bf16"
    side: int = 336
    new_tokens: int = 16
    words: Words = ANSWERS


# Of LLaVA and Qwen3-VL all engines make 576 visual tokens of these sides.
DEFAULTS = {
    "qwen3_vl": Defaults(side=768),
    "pi0": Defaults("transformers bf16", 224, 10, ACTIONS),
    "openvla_oft": Defaults("transformers bf16", 224, 1, HEAD),
}
"""By `model_type`; other models have `Defaults()`."""
_TABLE_WIDTH = 200
_UNKNOWN = 1 << 34
"""Free memory if the system does not report it."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="for checkpoints and what engines make of them; gigabytes")
    add("--model", default="llava-1.1b", help="a preset, or a config.json of your own (default: llava-1.1b)")
    add("--only", help="comma-separated: rows whose name holds one of these words, or as FORM:WAY two (default: all)")
    add("--reference", help=f"the form that others are compared with (default: {Defaults().reference})")
    add("--prompt", default=PROMPT)
    add(
        "--side",
        type=int,
        help="pixels of the pictures' sides (default: 336; 768 for Qwen3-VL, 224 for policies)",
    )
    add("--new-tokens", type=int, help="length of every answer, or denoising steps (default: 16; 10 for pi0)")
    add("--repeat", type=int, default=9, help="measured rounds (default: 9)")
    add("--warmup", type=int, default=1, help="rounds before them that do not count (default: 1)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="of every engine (default: all cores)")
    add("--memory-gb", type=float, help="what may be held at once (default: nine tenths of what is free)")
    add("--prepare", action="store_true", help="make and convert everything, and measure nothing")
    add("--json", type=Path, metavar="FILE.json", help="write every answer's times")
    add("--plot", type=Path, metavar="FILE.png", help="draw the table")
    return parser


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    options = _parser().parse_args(arguments)
    least = {"--side": 28, "--new-tokens": 2, "--repeat": 1, "--warmup": 0, "--threads": 1}
    for name, least_count in least.items():
        found = getattr(options, name[2:].replace("-", "_"))
        if found is not None and found < least_count:
            raise UsageError(f"{name} is {found}, expected at least {least_count}.")
    check_outputs([*json_outputs(options.json), *([(options.plot, PLOT_SUFFIXES)] if options.plot else [])])
    if options.plot:
        import_matplotlib()
    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    name, config = model_config(options.model)
    place = options.folder / name
    say(f"checkpoint {place / 'checkpoint'}")
    make_checkpoint(place / "checkpoint", config)
    defaults = DEFAULTS.get(config["model_type"], Defaults())
    reference = options.reference or defaults.reference
    forms, not_run = wanted_forms(config, options.only, reference)
    with (place / "peers.log").open("ab") as log:
        ready = []
        for form in forms:
            say(f"preparing {form.label}")
            try:
                process.prepare(form, place, options.threads, log)
                ready.append(form)
            except NotRunError as error:
                not_run[form.label] = str(error)
        side, new_tokens = options.side or defaults.side, options.new_tokens or defaults.new_tokens
        plan = Plan(options.prompt, side, new_tokens, options.threads, options.repeat, options.warmup)
        if options.prepare:
            ready = []
        free = int(options.memory_gb * 1e9) if options.memory_gb else int(0.9 * (available_bytes() or _UNKNOWN))
        groups, refused = sittings(ready, reference, weight_bytes(place / "checkpoint") // 2, free)
        read = PlainRead(options.threads)
        open_process = partial(process.Process, place=place, threads=options.threads, log=log)
        measured = measure(groups, plan, open_process, read.gb_per_s, say)
    measured.not_run = {**not_run, **refused, **measured.not_run}
    heading = (
        f"{place.name}, {options.threads} threads, {processor_name()}; {plan.new_tokens} {defaults.words.steps}, "
        f"medians (p95) of {options.repeat} interleaved rounds\n"
        f"x: over {reference} in the same sitting"
    )
    write_json(options.json, as_json(measured, place.name, plan, reference))
    if options.plot and measured.rows:
        write_whole(options.plot, plot(measured, heading, options.plot.suffix, defaults.words))
    shown = Console(width=_TABLE_WIDTH, soft_wrap=True)
    if measured.rows:
        shown.print(heading, highlight=False, markup=False)
        shown.print(table(measured, reference, defaults.words))
        shown.print(read_line(measured), highlight=False, markup=False)
    for label, reason in measured.not_run.items():
        shown.print(f"not run: {label}: {reason}.", highlight=False, markup=False)


def model_config(model: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the configuration of a preset or a file; raises `UsageError` and `CheckpointError`."""
    if model in PRESETS:
        return model, PRESETS[model]
    path = Path(model)
    if path.suffix != ".json":
        raise UsageError(unknown_name(f"'{model}' is no preset and no config.json", model, PRESETS, "Presets are"))
    return path.stem, read_json(path.parent, path.name)


def wanted_forms(config: Mapping[str, Any], only: str | None, reference: str) -> tuple[list[Form], dict[str, str]]:
    """Return the forms that `only` names, of all engines, and the reasons of engines without forms.

    A word of `only` may name an engine, a form, a way, or as FORM:WAY both. The reference is always included.
    """
    words = [word.strip() for word in (only or "").split(",") if word.strip()]
    forms: list[Form] = []
    not_run: dict[str, str] = {}
    for name in ENGINES:
        try:
            forms += engine(name).forms(config)
        except NotRunError as error:
            not_run[name.replace("_", "-")] = str(error)
    if words:
        forms = [kept for form in forms if (kept := _kept(form, words, reference))]
        if not forms:
            raise UsageError(f"--only {only} names no engine, form or way. Leave it out to see them all.")
        not_run = {label: why for label, why in not_run.items() if any(word in label for word in words)}
    return forms, not_run


def _kept(form: Form, words: Sequence[str], reference: str) -> Form | None:
    """Return the form with the ways that the words name; the reference has all unless they name some."""
    named = [way for way in form.ways if any(_names(word, form.label, way) for word in words)]
    if form.label == reference:
        named = [way for way in form.ways if way == form.ways[0] or way in named or not named]
    return Form(form.engine, form.name, form.bits, tuple(named)) if named else None


def _names(word: str, label: str, way: str) -> bool:
    """Return whether a word of --only names a form, a way, or with a colon both."""
    of_form, colon, of_way = word.partition(":")
    return of_form in label and of_way in way if colon else word in label or word in way


if __name__ == "__main__":
    sys.exit(main())
