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


def test_an_error_names_what_was_meant(bundle: Callable[..., Path], recwarn: pytest.WarningsRecorder) -> None:
    manifest = read_bundle(bundle("gqa-112")).manifest
    look_ups: list[tuple[Callable[[str], object], str, str]] = [
        (read_boards().board, "Orin-NX_16GB", "orin-nx-16gb"),
        (lambda name: parse_budget("llava", name), "retain64", "retain-64"),
        (lambda name: parse_budget("pi0", f"prune-80+{name}"), "rastr", "raster"),
        (load_method, "vision-zip", "visionzip"),
        (load_backend, "ort-gpu", "ort-cpu"),
        (lambda name: load_backend("openvino", compute=name), "FP32", "fp32"),
        (lambda name: new_builder(name, None, Path()), "tensorrt-rt", "tensorrt-rtx"),
        (lambda name: manifest.plan(name, "none"), "SinkPruner", "sinkpruner"),
        (lambda name: manifest.plan("sinkpruner", name), "retain_64", "retain-64"),
    ]
    for look_up, given, meant in look_ups:
        with pytest.raises(SinkpruneError, match=rf"'{given}'.*; did you mean '{meant}'\? .*: .*\b{meant}\b.*\."):
            look_up(given)
    for command in (("sinkprune-export", "pi05", "--random-weights", "-o", "x"), ("sinkprune-doctor", "pi05")):
        assert_refused(run(*command), "; did you mean 'pi0.5'? ")
    for name in ("", "---", "42", None, 3):
        assert guessed(name, [*FAMILIES, *read_boards().boards]) == ""
    for options in ({"order": "bgr"}, {"seed": 1}):
        new_request("cup.png", "What?", **options)  # type: ignore[arg-type]
    assert [warning.filename for warning in recwarn.list] == [__file__] * 2
