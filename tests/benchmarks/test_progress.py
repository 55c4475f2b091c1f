"""Benchmarks that take long show their progress."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

import kept_heights
import watching
from sinkprune.contract.command_line import progress_lines


class SlowPipeline:
    """Answers each question in 50 milliseconds, without a model."""

    def generate(self, *_: object, **__: object) -> SimpleNamespace:
        time.sleep(0.05)
        return SimpleNamespace(text="yes", ms={"ttft": 1.0}, tokens_per_layer=[8])

    def watch(self, camera: Any, *_: object, **__: object) -> list[SimpleNamespace]:
        return [self.generate() for _ in camera]


def test_long_benchmarks_have_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_lines, "SECONDS", 0.05)
    question = SimpleNamespace(prompt="Is it red?", is_right=lambda text: text == "yes")
    picture = Image.new("RGB", (8, 8))
    item = SimpleNamespace(load_image=lambda: picture, question=question)
    for module in (kept_heights, watching):
        monkeypatch.setattr(module, "Pipeline", SimpleNamespace(load=lambda *_, **__: SlowPipeline()))
    monkeypatch.setattr(kept_heights, "load_task", lambda *_: [item] * 4)
    monkeypatch.setattr(kept_heights, "heights", lambda _: [0.5])
    monkeypatch.setattr(watching, "questions_about", lambda *_: [(picture, question)] * 4)
    for main, said in ((kept_heights.main, "asking with retain-64"), (watching.main, "asking")):
        code, (_, lines) = main([str(Path("bundle"))]), capsys.readouterr()
        assert code == 0, lines
        assert re.search(rf"^{said}: [1-4] of 4 questions in ", lines, re.MULTILINE), lines
