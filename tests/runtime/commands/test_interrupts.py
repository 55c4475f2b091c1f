"""Ctrl-C in `sinkprune-run`: the answer so far, with its figures."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sinkprune.runtime.commands import run as command
from support.programs.commands import run

PRESSED_AT = 5


@pytest.fixture
def pressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C at the fifth token."""
    chose = command._TokenCount.chose

    def noting(observer: Any, token: int, logits: Any) -> None:
        chose(observer, token, logits)
        if observer._count == PRESSED_AT:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(command._TokenCount, "chose", noting)


def test_the_answer_so_far_is_reported(
    pressed: None, bundle: Callable[..., Path], photo_file: Path, tmp_path: Path
) -> None:
    report = tmp_path / "x.json"
    words = ("--prompt", "What?", "--max-new-tokens", 40, "--budget", "retain-64", "--json", report)
    ask = ("sinkprune-run", bundle("gqa-112"), "--image", photo_file, *words)
    outcome = run(*ask)
    assert outcome.code == 130
    assert "[retain-64] TTFT" in outcome.stdout
    found = json.loads(report.read_text())
    count = len(found["token_ids"])
    assert found["finish"] == "cancelled" and PRESSED_AT <= count <= PRESSED_AT + 1 and found["ms"]["ttft"] > 0
    assert outcome.stderr.endswith(f"interrupted; the answer has {count} tokens so far.\n")
    report.write_text("precious")
    outcome = run(*ask)
    assert outcome.stderr.endswith(
        f"so far. Earlier files stay; these results are in '{tmp_path}/x.interrupted.json'.\n"
    )
    assert report.read_text() == "precious" and (tmp_path / "x.interrupted.json").exists()
