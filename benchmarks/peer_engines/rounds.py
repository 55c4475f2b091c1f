"""Rounds: every form and way answers once in each, so that a drifting machine favours none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import mode
from typing import Any

import numpy as np

from peer_engines.engine import Form, NotRunError, Question
from peer_engines.process import Process
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.precision import Array
from sinkprune.contract.report import Spread

Say = Callable[[str], None]

_BYTES, _PIECE = 1 << 29, 1 << 22
_COPIES, _OWN_BYTES = 2, 1_500_000_000
"""An estimate of a form's memory: its weights as stored and as packed, and its library."""


@dataclass(frozen=True)
class Plan:
    """The questions, the same for all forms."""

    text: str
    side: int
    new_tokens: int
    threads: int
    repeat: int
    warmup: int
    seed: int = 0

    def question(self, turn: int, way: str) -> Question:
        """Return the question of a round, whose picture is used in this round only."""
        return Question(self.seed + turn + self.warmup, self.side, self.text, self.new_tokens, way)


@dataclass
class Row:
    """The measurements of a form in one way."""

    form: Form
    way: str
    facts: Mapping[str, Any]
    sitting: int
    """The number of the group of forms that were in memory together."""
    answers: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The row's name in tables."""
        return self.form.label if self.form.ways == (UNPRUNED,) else f"{self.form.label}, {self.way}"

    def spread(self, part: str) -> Spread | None:
        """Return the milliseconds of `ttft`, `per_token` or one of the parts; None if unknown."""
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
    """All rows, and the reasons of missing ones."""

    rows: list[Row] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    """Reasons, by label."""
    read_gb_per_s: list[float] = field(default_factory=list)
    """The speed of a plain read of memory at the start of each round: the bound of decoding, and the drift."""

    def agreeing(self, row: Row) -> float:
        """Return the share of rounds in which the first token is that of most unpruned answers."""
        unpruned = [one for one in self.rows if one.way == UNPRUNED]
        own = [answer["tokens"][0] for answer in row.answers]
        firsts = [[one.answers[turn]["tokens"][0] for one in unpruned] for turn in range(len(own))]
        return sum(bool(all_) and mode(all_) == one for all_, one in zip(firsts, own, strict=True)) / len(own)

    def reference(self, row: Row, label: str) -> Row | None:
        """Return the unpruned row of the reference in the same sitting as `row`."""
        found = [one for one in self.rows if one.form.label == label and one.sitting == row.sitting]
        return next((one for one in found if one.way == one.form.ways[0]), None)


def needed_bytes(form: Form, parameters: int) -> int:
    """Return about the most memory of a form of a model with so many parameters."""
    return int(_COPIES * parameters * form.bits / 8) + _OWN_BYTES


def sittings(
    forms: Sequence[Form], reference: str, parameters: int, free_bytes: int
) -> tuple[list[list[Form]], dict[str, str]]:
    """Return groups of forms that fit into memory together, and the reasons, by label, of forms that do not fit.

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
    """Measure every form of every group. A form that fails is reported, and the others go on.

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
            rows = [
                (process, Row(process.form, way, process.facts, sitting))
                for process in processes
                for way in process.form.ways
            ]
            for turn in range(-plan.warmup, plan.repeat):
                measured.read_gb_per_s.append(read_gb_per_s())
                _round(rows, turn, plan, measured.not_run, say)
            measured.rows += [row for _, row in rows if row.answers]
        finally:
            for process in processes:
                process.close()
    return measured


def _round(rows: Sequence[tuple[Process, Row]], turn: int, plan: Plan, not_run: dict[str, str], say: Say) -> None:
    """Run one question in every form and way; a `turn` below 0 is a warm-up."""
    # Rotate the order, so that the pause between rounds favours no form.
    shift = turn % len(rows) if rows else 0
    for process, row in [*rows[shift:], *rows[:shift]]:
        if row.form.label in not_run:
            continue
        say(f"round {turn + 1} of {plan.repeat}: {row.label}")
        try:
            answer = process.ask(plan.question(turn, row.way))
        except NotRunError as error:
            # The process has ended, so its other ways fail too.
            not_run[row.form.label] = str(error)
            continue
        if turn >= 0:
            row.answers.append(answer)


class PlainRead:
    """A buffer that threads read, each its own part, for the machine's speed of reading memory."""

    def __init__(self, threads: int, size: int = _BYTES) -> None:
        """Allocate `size` bytes, far more than any cache."""
        self._parts = np.array_split(np.ones(size // 4, np.float32), threads)
        self._pool = ThreadPoolExecutor(threads)

    def gb_per_s(self) -> float:
        """Read the buffer once, and return the speed."""
        start = time.perf_counter()
        list(self._pool.map(_read, self._parts))
        return sum(part.nbytes for part in self._parts) / (time.perf_counter() - start) / 1e9


def _read(numbers: Array) -> None:
    # numpy releases Python's lock within each piece, so threads run at the same time.
    for start in range(0, numbers.size, _PIECE // 4):
        np.maximum.reduce(numbers[start : start + _PIECE // 4])
