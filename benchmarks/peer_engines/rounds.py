"""Rounds: every form and way is asked once in each, so that a drifting machine favours none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mode
from typing import Any

from peer_engines.engine import Form, NotRunError, Question
from peer_engines.process import Process
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.reports.report import Spread

Say = Callable[[str], None]

_COPIES, _OWN_BYTES = 2, 1_500_000_000
"""A guess at what a form holds: its weights as they are in the file and as they are packed, and its library."""


@dataclass(frozen=True)
class Plan:
    """What is asked of everybody."""

    text: str
    side: int
    new_tokens: int
    threads: int
    repeat: int
    warmup: int
    seed: int = 0

    def question(self, turn: int, way: str) -> Question:
        """The question of a round: its picture is shown in this round only, and to everybody."""
        return Question(self.seed + turn + self.warmup, self.side, self.text, self.new_tokens, way)


@dataclass
class Row:
    """What was measured of a form in one way."""

    form: Form
    way: str
    facts: Mapping[str, Any]
    sitting: int
    """Which of the groups that fitted into memory together it ran in."""
    answers: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def label(self) -> str:
        """As tables name it."""
        return self.form.label if self.form.ways == (UNPRUNED,) else f"{self.form.label}, {self.way}"

    def spread(self, part: str) -> Spread | None:
        """Milliseconds of `ttft`, `per_token` or one of the parts; None where the engine does not tell."""
        values = [answer[part] if part in answer else answer["parts"].get(part) for answer in self.answers]
        known = [value for value in values if value is not None]
        return Spread.of(known) if known else None

    @property
    def peak_bytes(self) -> int | None:
        """The largest resident memory of any answer."""
        known = [answer["peak_bytes"] for answer in self.answers if answer["peak_bytes"] is not None]
        return max(known, default=None)

    @property
    def decode_gb_per_s(self) -> float | None:
        """Decoder weights that a token reads, over its time."""
        per_token, size = self.spread("per_token"), self.facts["decoder_bytes"]
        return size / per_token.median / 1e6 if per_token and per_token.median and size else None


@dataclass
class Measured:
    """All rows, and why others are missing."""

    rows: list[Row] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    """Reasons, by label."""
    read_gb_per_s: list[float] = field(default_factory=list)
    """Of a plain read of memory at the begin of each round: what decoding could reach, and how the machine drifts."""

    def agreeing(self, row: Row) -> float:
        """The share of rounds in which the answer's first token is what most unpruned ones begin with."""
        unpruned = [one for one in self.rows if one.way == UNPRUNED]
        begins = [[one.answers[turn]["tokens"][0] for one in unpruned] for turn in range(len(row.answers))]
        own = [answer["tokens"][0] for answer in row.answers]
        return sum(bool(all_) and mode(all_) == one for all_, one in zip(begins, own, strict=True)) / len(own)

    def reference(self, row: Row, label: str) -> Row | None:
        """The row of the reference that ran beside `row`: in the same sitting, unpruned."""
        found = [one for one in self.rows if one.form.label == label and one.sitting == row.sitting]
        return next((one for one in found if one.way == one.form.ways[0]), None)


def needed_bytes(form: Form, parameters: int) -> int:
    """About what a form of a model with so many parameters holds at most."""
    return int(_COPIES * parameters * form.bits / 8) + _OWN_BYTES


def sittings(
    forms: Sequence[Form], reference: str, parameters: int, free_bytes: int
) -> tuple[list[list[Form]], dict[str, str]]:
    """Groups of forms that fit into memory together, and the reasons, by label, of those that fit nowhere.

    The form labelled `reference` is the first of each group.
    """
    first = [form for form in forms if form.label == reference]
    taken = sum(needed_bytes(form, parameters) for form in first)
    groups: list[list[Form]] = []
    refused: dict[str, str] = {}
    for form in sorted(forms, key=lambda form: needed_bytes(form, parameters), reverse=True):
        needed = needed_bytes(form, parameters)
        if form in first:
            continue
        if taken + needed > free_bytes:
            refused[form.label] = (
                f"it needs about {needed / 1e9:.1f} GB beside the {taken / 1e9:.1f} GB of the reference, and "
                f"{free_bytes / 1e9:.1f} GB are to be used (--memory-gb)"
            )
            continue
        for group in groups:
            if sum(needed_bytes(other, parameters) for other in group) + needed <= free_bytes:
                group.append(form)
                break
        else:
            groups.append([*first, form])
    return groups or [first] * bool(first), refused


def measure(
    groups: Sequence[Sequence[Form]],
    plan: Plan,
    open_process: Callable[[Form], Process],
    read_gb_per_s: Callable[[], float],
    say: Say,
) -> Measured:
    """Ask every form of every group; who cannot be loaded or fails is told of, and the others go on.

    `read_gb_per_s` is called once a round.
    """
    measured = Measured()
    for sitting, forms in enumerate(groups):
        processes: list[Process] = []
        try:
            for form in forms:
                say(f"loading {form.label}")
                try:
                    processes.append(open_process(form))
                except NotRunError as error:
                    measured.not_run[form.label] = str(error)
            asked = [
                (process, Row(process.form, way, process.facts, sitting))
                for process in processes
                for way in process.form.ways
            ]
            for turn in range(-plan.warmup, plan.repeat):
                measured.read_gb_per_s.append(read_gb_per_s())
                _round(asked, turn, plan, measured.not_run, say)
            measured.rows += [row for _, row in asked if row.answers]
        finally:
            for process in processes:
                process.close()
    return measured


def _round(asked: Sequence[tuple[Process, Row]], turn: int, plan: Plan, not_run: dict[str, str], say: Say) -> None:
    """Ask everybody once; a `turn` below 0 does not count."""
    # Each round starts with another: being first after a pause is nobody's privilege.
    shift = turn % len(asked) if asked else 0
    for process, row in [*asked[shift:], *asked[:shift]]:
        if row.form.label in not_run:
            continue
        say(f"round {turn + 1} of {plan.repeat}: {row.label}")
        try:
            answer = process.ask(plan.question(turn, row.way))
        except NotRunError as error:
            # Its process is gone, and with it all of its ways.
            not_run[row.form.label] = str(error)
            continue
        if turn >= 0:
            row.answers.append(answer)
