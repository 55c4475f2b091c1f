"""The benchmark of peers: checkpoints, forms, rounds, reports, and engines that answer alike."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

import peers
from peer_engines.checkpoint import chat_text, make_checkpoint, random_picture, weight_bytes
from peer_engines.engine import ENGINES, Form, NotRunError, Question, engine
from peer_engines.report import as_json
from peer_engines.rounds import Plan, measure
from peer_engines.transformers_engine import Prompt
from sinkprune import Pipeline
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.models.peer_shapes import LLAVA, OFT, PI0, QWEN, QWEN3

PLAN = Plan("Why?", side=28, new_tokens=4, threads=2, repeat=4, warmup=1)
FAST, SLOW = Form("llama_cpp", "Q4_0", 4.5), Form("transformers", "fp32", 32)
OURS = Form("sinkprune", "ort-cpu int4", 4.125, ("none", "retain-64"))


class FakeProcess:
    """Answers with fixed times, and records its questions; fails at the fifth question of all where `fails`."""

    def __init__(self, form: Form, asked: list[tuple[str, Question]], ttft: float, *, fails: bool = False) -> None:
        self.form, self.closed = form, False
        self.facts = {"load_seconds": 1.0, "load_peak_bytes": 5, "versions": {"it": "1"}, "decoder_bytes": 2_000_000}
        self._asked, self._ttft, self._fails = asked, ttft, fails

    def ask(self, question: Question) -> dict[str, Any]:
        self._asked.append((self.form.name, question))
        if self._fails and len(self._asked) > 4:
            raise NotRunError("out of paper")
        times = {"ttft": self._ttft, "per_token": 20.0, "parts": {"vision": self._ttft / 4}}
        return {**times, "input_tokens": 9, "tokens": [1, 2], "peak_bytes": 7_000_000_000}

    def close(self) -> None:
        self.closed = True


def test_everybody_sees_one_picture_a_round_and_ratios_are_of_one_sitting() -> None:
    asked, opened, ttfts = list[tuple[str, Question]](), list[FakeProcess](), {SLOW: 100.0, OURS: 50.0, FAST: 200.0}

    def open_process(form: Form) -> Any:
        opened.append(FakeProcess(form, asked, ttfts[form]))
        return opened[-1]

    measured = measure([[SLOW, OURS], [SLOW, FAST]], PLAN, open_process, lambda: 50.0, lambda text: None)
    count = PLAN.warmup + PLAN.repeat
    rounds = [asked[start : start + 3] for start in range(0, 3 * count, 3)]
    seeds = [{question.seed for _, question in turn} for turn in rounds]
    assert all(len(found) == 1 for found in seeds) and len(set.union(*seeds)) == count
    everybody = [("fp32", "none"), ("ort-cpu int4", "none"), ("ort-cpu int4", "retain-64")]
    assert all(sorted((name, question.way) for name, question in turn) == everybody for turn in rounds)
    # Everybody begins a round sometimes.
    assert len({(turn[0][0], turn[0][1].way) for turn in rounds}) == 3
    assert all(process.closed for process in opened)
    assert [len(row.answers) for row in measured.rows] == [PLAN.repeat] * 5
    assert len(measured.read_gb_per_s) == 2 * count

    for row in measured.rows:
        if row.sitting == 1:
            row.answers = [{**answer, "ttft": answer["ttft"] * 2} for answer in row.answers]
    content = json.loads(json.dumps(as_json(measured, "tiny", PLAN, SLOW.label)))
    ratios = {(row["form"], row["way"]): row["ttft_over_reference"] for row in content["rows"]}
    ours = {("ort-cpu int4", "none"): 0.5, ("ort-cpu int4", "retain-64"): 0.5}
    assert ratios == {("fp32", "none"): 1.0, ("Q4_0", "none"): 2.0, **ours}
    first = content["rows"][0]
    medians = {part: spread["median"] for part, spread in first["ms"].items()}
    assert medians == {"ttft": 100.0, "per_token": 20.0, "vision": 25.0}
    # 2 MB in 20 ms
    assert first["decode_gb_per_s"] == pytest.approx(0.1)
    assert len(first["answers"]) == PLAN.repeat and content["plan"]["repeat"] == PLAN.repeat


def test_a_form_that_fails_is_reported_and_the_others_go_on() -> None:
    asked = list[tuple[str, Question]]()

    def open_process(form: Form) -> Any:
        if form == SLOW:
            raise NotRunError("it is not here")
        return FakeProcess(form, asked, 3.0, fails=form == FAST)

    measured = measure([[FAST, SLOW, OURS]], PLAN, open_process, lambda: 1.0, lambda text: None)
    assert measured.not_run == {"transformers fp32": "it is not here", "llama-cpp Q4_0": "out of paper"}
    assert [len(row.answers) for row in measured.rows] == [1, 4, 4]


REFERENCE = "sinkprune ort-cpu fp32"


@pytest.mark.slow
def test_it_measures_what_is_here_and_lists_what_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    (tmp_path / "tiny.json").write_text(json.dumps(LLAVA))
    report, picture = tmp_path / "peers.json", tmp_path / "peers.png"
    given = ["--folder", str(tmp_path), "--model", str(tmp_path / "tiny.json"), "--reference", REFERENCE]
    given += ["--only", "llama-cpp,nobody", "--repeat", "2", "--new-tokens", "3", "--threads", "1"]
    assert peers.main([*given, "--json", str(report), "--plot", str(picture)]) == 0
    content = json.loads(report.read_text())
    rows = {row["way"]: row for row in content["rows"]}
    assert list(rows) == ["none", "retain-192", "retain-128", "retain-64", "retain-32", "retain-64+tower"]
    for row in rows.values():
        assert len(row["answers"]) == 2 and row["input_tokens"] == 626
        assert all(len(answer["tokens"]) == 3 for answer in row["answers"])
        assert row["peak_rss_bytes"] > 10_000_000 and row["ms"]["ttft"]["median"] > row["ms"]["prefill"]["median"] > 0
    assert rows["none"]["ttft_over_reference"] == 1 and rows["none"]["first_token_as_most"] == 1
    assert len(content["read_gb_per_s"]) == 3
    assert list(content["not_run"]) == ["llama-cpp"]
    shown = capsys.readouterr().out
    assert "not run: llama-cpp: " in shown and f"{REFERENCE}, retain-64" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_engine_has_forms_or_a_reason_and_a_word_may_be_one_row() -> None:
    forms, not_run = peers.wanted_forms(LLAVA, None, REFERENCE)
    assert {form.engine for form in forms} | {label.replace("-", "_") for label in not_run} == set(ENGINES)
    assert REFERENCE in {form.label for form in forms}
    forms, _ = peers.wanted_forms(QWEN3, "sinkprune openvino int8:prune-8, ort-cpu int4:none", REFERENCE)
    chosen = {form.label: form.ways for form in forms}
    everything = ("none", "prune-66.7", "prune-77.8", "prune-80", "prune-88.9")
    assert chosen[REFERENCE] == everything
    assert chosen["sinkprune openvino int8"] == ("prune-80", "prune-88.9")
    assert chosen["sinkprune ort-cpu int4"] == ("none",) and len(chosen) == 3
    forms, _ = peers.wanted_forms(QWEN3, f"{REFERENCE}:prune-80", REFERENCE)
    assert [(form.label, form.ways) for form in forms] == [(REFERENCE, ("none", "prune-80"))]


@pytest.mark.parametrize(("config", "side"), [(LLAVA, 336), (QWEN, 112), (QWEN3, 96)], ids=["llava", "qwen", "qwen3"])
def test_transformers_and_the_exporter_read_the_same_model_from_it(
    config: dict[str, Any], side: int, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    make_checkpoint(folder, config)
    assert AutoConfig.from_pretrained(folder).text_config.hidden_size == config["text_config"]["hidden_size"]
    model, info = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert sum(parameter.numel() for parameter in model.parameters()) * 2 == weight_bytes(folder)
    picture, question = random_picture(3, side), "What is there on the old chair?"
    inputs = Prompt(folder, model.config)(chat_text(folder, question), Image.fromarray(picture))
    theirs = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)[0, -4:]
    export_bundle(ExportRequest(str(folder), budgets=()), tmp_path / "bundle")
    pipeline = Pipeline.load(tmp_path / "bundle", threads=1)
    ours = pipeline.generate(picture, question, budget="none", max_new_tokens=4, min_new_tokens=4)
    assert ours.token_ids == theirs.tolist()
    assert ours.prompt_tokens + ours.visual_tokens == inputs["input_ids"].shape[1]


QUESTION = Question(seed=3, side=56, text="What is there on the old chair?", new_tokens=4)


@pytest.fixture
def gradients() -> Iterator[None]:
    """The engine of PyTorch turns gradients off in its process."""
    yield
    torch.set_grad_enabled(True)


@pytest.mark.usefixtures("gradients")
@pytest.mark.parametrize("config", [PI0, OFT], ids=["pi0", "openvla-oft"])
def test_the_peer_and_this_project_change_the_same_action_most(config: dict[str, Any], tmp_path: Path) -> None:
    steps = 1 if config is OFT else QUESTION.new_tokens
    make_checkpoint(tmp_path / "checkpoint", config)
    found = {}
    for name, form_name in (("sinkprune", "ort-cpu fp32"), ("transformers", "fp32")):
        module = engine(name)
        form = next(form for form in module.forms(config) if form.name == form_name)
        module.prepare(form, tmp_path)
        loaded = module.load(form, tmp_path, 1)
        found[name] = [loaded.answer(Question(seed, 56, QUESTION.text, steps)) for seed in range(3)]
        assert loaded.decoder_bytes
    for ours, theirs in zip(found["sinkprune"], found["transformers"], strict=True):
        assert ours.tokens == theirs.tokens and ours.input_tokens == theirs.input_tokens
    for timings in found.values():
        shares = [(sum(timing.parts.values()) + steps * timing.per_token) / timing.ttft for timing in timings]
        # On a busy machine reading the frames may take longer than all parts.
        assert 0.3 < max(shares) <= 1.001
