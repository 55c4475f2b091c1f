"""The benchmark of peers as a command, with the engine that is always there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import peers
from peer_engines.engine import ENGINES
from support.models.peer_shapes import LLAVA, QWEN3

OURS = "sinkprune ort-cpu fp32"


@pytest.mark.slow
def test_it_measures_what_is_here_and_lists_what_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    (tmp_path / "tiny.json").write_text(json.dumps(LLAVA))
    report, picture = tmp_path / "peers.json", tmp_path / "peers.png"
    given = ["--folder", str(tmp_path), "--model", str(tmp_path / "tiny.json"), "--reference", OURS]
    given += ["--only", "llama-cpp,nobody", "--repeat", "2", "--new-tokens", "3", "--threads", "1"]
    assert peers.main([*given, "--json", str(report), "--plot", str(picture)]) == 0
    content = json.loads(report.read_text())
    rows = {row["way"]: row for row in content["rows"]}
    assert list(rows) == ["none", "retain-192", "retain-128", "retain-64", "retain-32"]
    for row in rows.values():
        assert len(row["answers"]) == 2 and row["input_tokens"] == 626
        assert all(len(answer["tokens"]) == 3 for answer in row["answers"])
        assert row["peak_rss_bytes"] > 10_000_000 and row["ms"]["ttft"]["median"] > row["ms"]["prefill"]["median"] > 0
    assert rows["none"]["ttft_over_reference"] == 1 and rows["none"]["first_token_as_most"] == 1
    assert len(content["read_gb_per_s"]) == 3
    assert list(content["not_run"]) == ["llama-cpp"]
    shown = capsys.readouterr().out
    assert "not run: llama-cpp: " in shown and f"{OURS}, retain-64" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_engine_has_forms_or_a_reason() -> None:
    forms, not_run = peers.wanted_forms(LLAVA, None, OURS)
    found = {form.engine for form in forms} | {label.replace("-", "_") for label in not_run}
    assert found == set(ENGINES)
    assert OURS in {form.label for form in forms}


def test_a_form_and_a_way_in_one_word_are_one_row() -> None:
    forms, _ = peers.wanted_forms(QWEN3, "sinkprune openvino int8:prune-8, ort-cpu int4:none", OURS)
    chosen = {form.label: form.ways for form in forms}
    everything = ("none", "prune-66.7", "prune-77.8", "prune-80", "prune-88.9")
    assert chosen[OURS] == everything
    assert chosen["sinkprune openvino int8"] == ("prune-80", "prune-88.9")
    assert chosen["sinkprune ort-cpu int4"] == ("none",) and len(chosen) == 3
    forms, _ = peers.wanted_forms(QWEN3, f"{OURS}:prune-80", OURS)
    assert [(form.label, form.ways) for form in forms] == [(OURS, ("none", "prune-80"))]
