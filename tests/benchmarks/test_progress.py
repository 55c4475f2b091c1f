"""Benchmarks that ask few questions, or are interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

import follow_ups
from sinkprune.contract.command_line.command import INTERRUPTED


class QuickPipeline:
    """Answers each question without a model."""

    def generate(self, *_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(text="yes", ms={"ttft": 1.0}, tokens_per_layer=[8])


def test_few_questions_are_noted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    question = SimpleNamespace(prompt="Is it red?", is_right=lambda text: text == "yes")
    picture = Image.new("RGB", (8, 8))
    monkeypatch.setattr(follow_ups, "Pipeline", SimpleNamespace(load=lambda *_, **__: QuickPipeline()))
    monkeypatch.setattr(follow_ups, "questions_about", lambda *_: [(picture, question)] * 4)
    monkeypatch.setattr(follow_ups, "_last", lambda _: {1})
    assert follow_ups.main([str(Path("bundle"))]) == 0
    assert "Small sample: 4 questions. " in capsys.readouterr().out


def test_interrupted_follow_ups_keep_the_answers_so_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Interrupted(QuickPipeline):
        asked = 0

        def generate(self, *_: object, **__: object) -> SimpleNamespace:
            self.asked += 1
            if self.asked > 3 * 4 + 7:
                raise KeyboardInterrupt
            return super().generate()

    question = SimpleNamespace(prompt="Is it red?", is_right=lambda text: text == "yes")
    monkeypatch.setattr(follow_ups, "Pipeline", SimpleNamespace(load=lambda *_, **__: Interrupted()))
    monkeypatch.setattr(follow_ups, "questions_about", lambda *_: [(Image.new("RGB", (8, 8)), question)] * 4)
    monkeypatch.setattr(follow_ups, "_last", lambda _: {1})
    report, part = tmp_path / "follow-ups.json", tmp_path / "follow-ups.interrupted.json"
    report.write_text("earlier", encoding="utf-8")
    code = follow_ups.main(["bundle", "--budgets", "retain-64,retain-32", "--json", str(report)])
    printed, lines = capsys.readouterr()
    assert code == INTERRUPTED
    assert [line.split(":")[0] for line in printed.splitlines()] == [
        "retain-64    4 questions",
        "retain-32    2 questions",
        "Small sample",
        "Small sample",
    ]
    assert "Small sample: 2 questions. " in printed and "Small sample: 1 picture. " in printed
    assert report.read_text(encoding="utf-8") == "earlier"
    kept = json.loads(part.read_text(encoding="utf-8"))
    assert {budget: figures["questions"] for budget, figures in kept.items()} == {"retain-64": 4, "retain-32": 2}
    earlier = f"Earlier files stay; these results are in '{part}'."
    assert lines.splitlines()[-1] == f"interrupted; retain-32 was asked 2 of 4 questions. {earlier}"
