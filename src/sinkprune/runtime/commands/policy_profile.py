"""`sinkprune-profile` for a robot policy: measures every budget at several numbers of denoising steps."""

from __future__ import annotations

from argparse import ArgumentTypeError
from functools import partial
from typing import Any

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks.format_value import counted, format_value
from sinkprune.contract.command_line.table_console import (
    USUAL_REPEAT,
    TableConsole,
    few_note,
    make_table,
    median_text,
    noise_note,
    plain_text,
    spread_text,
)
from sinkprune.contract.errors import UsageError
from sinkprune.contract.manifest import PolicyFacts
from sinkprune.contract.reports.policy_report import PolicyBudgetReport, PolicyReport
from sinkprune.runtime.acting.observation import STEPS
from sinkprune.runtime.commands import Options, name_list
from sinkprune.runtime.commands.interrupts import until_interrupt, write_measured
from sinkprune.runtime.commands.memory import check_memory
from sinkprune.runtime.commands.picture_notes import note_pictures
from sinkprune.runtime.commands.policy_options import Observations, load_policy
from sinkprune.runtime.families import load_family
from sinkprune.runtime.profiling.policies import PolicyRounds, plot_policy
from sinkprune.runtime.profiling.profile import Rounds
from sinkprune.runtime.steps.pictures import decoded

_FEWER_STEPS = (5, 2)
_LEGEND = """\
visual: tokens of the frames > into the decoder > in its last layer; mean %: their mean over all layers, of none's
tower: the vision tower on all cameras; prefix: the decoder on them and the text; step: the expert, once
x: speed-up over none, of chunks with as many steps; ideal x: what FLOPs allow; achieved: prefix x as a share of ideal
jitter: from the median to p95"""


def step_list(words: str) -> list[int]:
    """Return the numbers of steps in a comma-separated option; raises `ArgumentTypeError`."""
    try:
        return [STEPS.named("--steps").check(int(word)) for word in name_list(words)]
    except ValueError as error:
        raise ArgumentTypeError(f"found {format_value(words)}, expected whole numbers with commas between") from error


def profile_policy(options: Options, bundle: Bundle, observations: Observations) -> None:
    """Measure the policy `bundle`, print a table, and write the report.

    Raises what `Policy.load` and `Policy.act` raise, and `KeyboardInterrupt` after the report of complete rounds.
    """
    manifest = bundle.manifest
    if len(observations.moments) > 1:
        raise UsageError(
            f"found {len(observations.moments)} moments, expected one: all budgets are measured on the same frames. "
            "Give a file for each camera."
        )
    observations = observations.for_policy(manifest.acting)
    (moment,) = observations.moments
    steps = options.steps or _usual_steps(manifest.acting)
    notes = observations.check(manifest, options.prompt)
    budgets = list(dict.fromkeys([UNPRUNED, *(options.budgets or manifest.plans[options.method])]))
    family = load_family(manifest, None)
    # Decoded once: files would count as part of no chunk, and take time between them.
    frames = [None if path is None else decoded(path, family) for path in moment.cameras]
    given = [frame for frame in frames if frame is not None]
    files = [path for path in moment.cameras if path is not None]
    notes += note_pictures(family, files, given)
    check_memory(options, bundle, [*map(family.layout, given)], options.method, budgets, options.prompt, 0)
    observations.print_order(manifest.acting)
    policy = load_policy(options, bundle)
    rounds = PolicyRounds(policy, frames, options.prompt, moment.state, budgets, steps, method=options.method)
    interrupted = measured_rounds(rounds, options.repeat or USUAL_REPEAT, options.warmup, "chunks")
    report = rounds.report()
    write_measured(options, report, plot_policy, lambda: _print_tables(report), notes, interrupted)


def measured_rounds(rounds: Rounds[Any, Any], repeat: int, warmup: int, unit: str) -> str:
    """Measure `rounds`, with progress in a `unit`; returns what their report counts after Ctrl-C, else "".

    Raises `KeyboardInterrupt` before the first round is complete, and what `Rounds.measure` raises.
    """
    measure = partial(rounds.measure, repeat, warmup)
    interrupt = until_interrupt(measure, rounds.kinds * (warmup + repeat), unit)
    if interrupt and not rounds.count:
        raise KeyboardInterrupt("no whole round was measured, so nothing was kept.") from interrupt
    return f"the report counts {rounds.count} of {counted(repeat, 'round')}." if interrupt else ""


def _usual_steps(facts: PolicyFacts) -> list[int]:
    """Return the checkpoint's number of steps, and fewer."""
    return [facts.steps, *(fewer for fewer in _FEWER_STEPS if fewer < facts.steps)]


def _print_tables(report: PolicyReport) -> None:
    console, rounds = TableConsole(), counted(report.repeat, "interleaved run")
    console.print_machine(
        report,
        f"{counted(report.cameras, 'camera')}, {report.prompt_tokens} text tokens, {report.actions} actions a chunk; "
        f"milliseconds, median (p95) of {rounds}{few_note(report.repeat)}",
    )
    rows, unpruned = report.rows(), report.budgets[UNPRUNED].mean_visual_tokens
    headings = ["visual", "mean %", "tower", "prefix", "select", "step"]
    parts = make_table(["budget"], [*headings, "prefix x", "ideal x", "achieved", "step x", "ideal step x"])
    for name, budget in rows.items():
        parts.add_row(
            plain_text(name),
            f"{budget.visual_tokens}>{budget.kept_after_sanitizer}>{budget.tokens_per_layer[-1]}",
            f"{100 * budget.mean_visual_tokens / unpruned:.1f}",
            median_text(budget.ms["vision"]),
            spread_text(budget.ms["prefill"]),
            median_text(budget.ms["select"]),
            spread_text(budget.ms["step"]),
            f"{budget.speedup.prefix:.2f}",
            f"{budget.flops_speedup.prefix:.2f}",
            f"{100 * budget.efficiency.prefix:.0f} %",
            f"{budget.speedup.step:.2f}",
            f"{budget.flops_speedup.step:.2f}",
        )
    console.print(parts)
    chunks = make_table(["budget"], ["steps", "chunk", "Hz", "jitter", "chunk x", "ideal x"])
    for name, budget in rows.items():
        for steps, chunk in budget.chunks.items():
            chunks.add_row(
                plain_text(name),
                steps,
                spread_text(chunk.ms),
                f"{chunk.rate_hz:.2f}",
                f"{chunk.jitter_ms:.1f}",
                f"{chunk.speedup:.2f}",
                f"{chunk.flops_speedup:.2f}",
            )
    console.print(chunks)
    console.print(_LEGEND)
    spreads = [chunk.ms for budget in rows.values() for chunk in budget.chunks.values()]
    if len(spreads) > 1:
        what = "a chunk of one budget and number of steps"
        console.print(plain_text(noise_note(what, report.repeat, spreads)))
    for name, budget in rows.items():
        console.print(plain_text(f"{name}: {_shares(budget)}"))
    if report.load_ms is not None and report.first_chunk_ms is not None:
        console.print(
            f"loaded in {report.load_ms:.0f} ms, the first chunk was there at {report.first_chunk_ms:.0f} ms"
        )


def _shares(budget: PolicyBudgetReport) -> str:
    """Return the parts of a chunk at the first number of steps, as shares of their sum."""
    steps = next(iter(budget.chunks))
    ms = {part: spread.median for part, spread in budget.ms.items() if part != "select"}
    ms[f"{counted(int(steps), 'step')} of the expert"] = int(steps) * ms.pop("step")
    whole = sum(ms.values())
    return "of a chunk: " + ", ".join(f"{part} {100 * own / whole:.0f} %" for part, own in ms.items())
