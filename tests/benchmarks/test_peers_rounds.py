"""Rounds, sittings and reports of the benchmark of peers, without any engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from peer_engines.engine import Form, NotRunError, Question
from peer_engines.report import as_json
from peer_engines.rounds import Measured, Plan, measure

PLAN = Plan("Why?", side=28, new_tokens=4, threads=2, repeat=4, warmup=1)
FAST, SLOW = Form("llama_cpp", "Q4_0", 4.5), Form("transformers", "fp32", 32)
OURS = Form("sinkprune", "ort-cpu int4", 4.125, ("none", "retain-64"))


class FakeProcess:
    """Answers with fixed times, and records its questions."""

    def __init__(self, form: Form, asked: list[tuple[str, Question]], ttft: Callable[[int], float]) -> None:
        self.form, self.closed = form, False
        self.facts = {"load_seconds": 1.0, "load_peak_bytes": 5, "versions": {"it": "1"}, "decoder_bytes": 2_000_000}
        self._asked, self._ttft = asked, ttft

    def ask(self, question: Question) -> dict[str, Any]:
        self._asked.append((self.form.name, question))
        ttft = self._ttft(len(self._asked))
        parts = {"vision": ttft / 4}
        return {
            "ttft": ttft,
            "per_token": 20.0,
            "input_tokens": 9,
            "tokens": [1, 2] if self.form != FAST else [3, 2],
            "parts": parts,
            "peak_bytes": 7_000_000_000,
        }

    def close(self) -> None:
        self.closed = True


def run(groups: list[list[Form]], ttfts: dict[Form, float]) -> tuple[Measured, list[tuple[str, Question]], list[Any]]:
    asked: list[tuple[str, Question]] = []
    opened: list[FakeProcess] = []

    def open_process(form: Form) -> Any:
        opened.append(FakeProcess(form, asked, lambda _: ttfts[form]))
        return opened[-1]

    return measure(groups, PLAN, open_process, lambda: 50.0, lambda text: None), asked, opened


def test_in_a_round_everybody_is_shown_one_picture_and_no_round_shows_another_rounds() -> None:
    measured, asked, opened = run([[SLOW, OURS]], {SLOW: 100.0, OURS: 50.0})
    rounds = [asked[start : start + 3] for start in range(0, len(asked), 3)]
    assert len(rounds) == PLAN.warmup + PLAN.repeat
    seeds = [{question.seed for _, question in turn} for turn in rounds]
    assert all(len(found) == 1 for found in seeds) and len(set.union(*seeds)) == len(rounds)
    for turn in rounds:
        assert sorted((name, question.way) for name, question in turn) == [
            ("fp32", "none"),
            ("ort-cpu int4", "none"),
            ("ort-cpu int4", "retain-64"),
        ]
    # Everybody begins a round sometimes.
    assert len({(turn[0][0], turn[0][1].way) for turn in rounds}) == 3
    assert all(process.closed for process in opened)
    assert [len(row.answers) for row in measured.rows] == [PLAN.repeat] * 3
    assert len(measured.read_gb_per_s) == len(rounds)


def test_a_form_that_fails_is_reported_and_the_others_go_on() -> None:
    asked: list[tuple[str, Question]] = []

    def third(count: int) -> float:
        if count > 4:
            raise NotRunError("out of paper")
        return 1.0

    def open_process(form: Form) -> Any:
        if form == SLOW:
            raise NotRunError("it is not here")
        return FakeProcess(form, asked, third if form == FAST else lambda _: 3.0)

    measured = measure([[FAST, SLOW, OURS]], PLAN, open_process, lambda: 1.0, lambda text: None)
    assert measured.not_run == {"transformers fp32": "it is not here", "llama-cpp Q4_0": "out of paper"}
    assert {row.label: len(row.answers) for row in measured.rows} == {
        "llama-cpp Q4_0": 1,
        "sinkprune ort-cpu int4, none": 4,
        "sinkprune ort-cpu int4, retain-64": 4,
    }


def test_a_ratio_is_to_the_reference_of_the_same_sitting() -> None:
    measured, _, _ = run([[SLOW, OURS], [SLOW, FAST]], {SLOW: 100.0, OURS: 50.0, FAST: 200.0})
    for row in measured.rows:
        if row.sitting == 1:
            row.answers = [{**answer, "ttft": answer["ttft"] * 2} for answer in row.answers]
    content = json.loads(json.dumps(as_json(measured, "tiny", PLAN, SLOW.label)))
    ratios = {(row["form"], row["way"]): row["ttft_over_reference"] for row in content["rows"]}
    assert ratios == {
        ("fp32", "none"): 1.0,
        ("ort-cpu int4", "none"): 0.5,
        ("ort-cpu int4", "retain-64"): 0.5,
        ("Q4_0", "none"): 2.0,
    }
    first = content["rows"][0]
    assert first["ms"] == {
        "ttft": {"median": 100.0, "p95": 100.0},
        "per_token": {"median": 20.0, "p95": 20.0},
        "vision": {"median": 25.0, "p95": 25.0},
    }
    # 2 MB in 20 ms
    assert first["decode_gb_per_s"] == pytest.approx(0.1)
    assert len(first["answers"]) == PLAN.repeat and content["plan"]["repeat"] == PLAN.repeat
