"""The backend that runs where none is named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune import Pipeline
from sinkprune.contract.errors import BackendError
from sinkprune.runtime.backends import known
from sinkprune.runtime.backends.known import quickest_backend
from support.programs.commands import run
from support.references.same_answers import QUESTION

PAIR = "ort-cpu+openvino"
BOTH = {"onnxruntime", "openvino"}


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        (BOTH, PAIR),
        ({*BOTH, "tensorrt", "tensorrt_rtx"}, PAIR),
        ({"openvino"}, "openvino"),
        ({"onnxruntime"}, "ort-cpu"),
        # Its error says what to install.
        ({"tensorrt"}, "ort-cpu"),
        (set(), "ort-cpu"),
    ],
)
def test_the_quickest_of_what_is_installed(installed: set[str], expected: str) -> None:
    assert quickest_backend(installed.__contains__) == expected


def test_it_runs_and_is_named(bundle: Callable[..., Path], photo_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "is_installed", BOTH.__contains__)
    question = (bundle("gqa-112"), "--image", photo_file, "--prompt", QUESTION, "--max-new-tokens", 1)
    assert f" ms in all on {PAIR}; visual tokens" in run("sinkprune-run", *question).stdout
    assert json.loads(run("sinkprune-run", *question, "--json").stdout)["backend"] == PAIR
    report = run("sinkprune-doctor", bundle("gqa-112"), "--json")
    assert json.loads(report.stdout)["backend"] == PAIR
    named = json.loads(run("sinkprune-run", *question, "--backend", "ort-cpu", "--json").stdout)
    assert named["backend"] == "ort-cpu"


def test_a_library_that_does_not_import_is_an_error(
    bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "is_installed", BOTH.__contains__)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(BackendError, match=r"'ort-cpu\+openvino' needs openvino, .* take --backend ort-cpu\.$"):
        Pipeline.load(bundle("gqa-112"))
