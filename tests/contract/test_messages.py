"""Messages have the name that was meant, and warnings the line of the user's program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune.contract.budgets import FAMILIES, parse_budget
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.checks import guessed
from sinkprune.contract.errors import SinkpruneError
from sinkprune.engines.targets import new_builder
from sinkprune.export.methods import load_method
from sinkprune.jetson.boards import read_boards
from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.steps.request import new_request
from support.programs.commands import assert_refused, run


@pytest.mark.parametrize(
    ("look_up", "given", "meant"),
    [
        (read_boards().board, "Orin-NX_16GB", "orin-nx-16gb"),
        (lambda name: parse_budget("llava", name), "retain64", "retain-64"),
        (lambda name: parse_budget("pi0", f"prune-80+{name}"), "rastr", "raster"),
        (load_method, "vision-zip", "visionzip"),
        (load_backend, "ort-gpu", "ort-cpu"),
        (lambda name: load_backend("openvino", compute=name), "FP32", "fp32"),
        (lambda name: new_builder(name, None, Path()), "tensorrt-rt", "tensorrt-rtx"),
    ],
)
def test_an_error_names_what_was_meant(look_up: Callable[[str], object], given: str, meant: str) -> None:
    with pytest.raises(SinkpruneError, match=rf"'{given}'.*; did you mean '{meant}'\? .*: .*\b{meant}\b.*\."):
        look_up(given)


def test_a_bundle_names_what_was_meant(bundle: Callable[..., Path]) -> None:
    manifest = read_bundle(bundle("gqa-112")).manifest
    for method, budget, meant in (("SinkPruner", "none", "sinkpruner"), ("sinkpruner", "retain_64", "retain-64")):
        with pytest.raises(SinkpruneError, match=rf"; did you mean '{meant}'\? It holds: "):
            manifest.plan(method, budget)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("sinkprune-export", "llava-7b", "--random-weights", "-o", "out"), "llava-1.5-7b"),
        (("sinkprune-export", "pi05", "--random-weights", "-o", "out"), "pi0.5"),
        (("sinkprune-doctor", "llava-7b"), "llava-1.5-7b"),
    ],
)
def test_a_command_names_what_was_meant(
    words: tuple[str, ...], meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(run(*words), f"; did you mean '{meant}'? ")


def test_a_name_like_no_other_means_none() -> None:
    for name in ("", "---", "42", None, 3):
        assert guessed(name, [*FAMILIES, *read_boards().boards]) == ""


@pytest.mark.parametrize("options", [{"order": "bgr"}, {"seed": 1}])
def test_a_warning_names_the_line_that_called(options: dict[str, object], recwarn: pytest.WarningsRecorder) -> None:
    new_request("cup.png", "What?", **options)  # type: ignore[arg-type]
    assert [warning.filename for warning in recwarn.list] == [__file__]
