"""Bundles of format 3, whose dialects and budgets have other names, are read as what they are today."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manifests import manifest_data, refusal, write_data
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.manifest import FORMER_DIALECTS, DialectName


def in_format_3(data: dict[str, Any]) -> dict[str, Any]:
    """The JSON of format 4 as format 3 had it."""
    names = {now: before for before, now in FORMER_DIALECTS.items()}
    budgets = {name: {**budget} for name, budget in data["budgets"].items()}
    for budget in budgets.values():
        budget["batch"] = budget.pop("diversity_group_size")
    return {**data, "format_version": 3, "dialect": names[data["dialect"]], "budgets": budgets}


@pytest.mark.parametrize(("dialect", "former"), [("opset24", "onnx24"), ("opset20", "trt10")])
@pytest.mark.parametrize("name", ["gqa-112", "qwen"])
@pytest.mark.parametrize("option", ["", "+serial"])
def test_a_bundle_of_format_3_is_the_same_bundle(
    name: str, option: str, dialect: DialectName, former: str, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    original = bundle(name, budgets=({"gqa-112": "retain-64", "qwen": "prune-88.9"}[name] + option,), dialect=dialect)
    copied = Path(shutil.copytree(original, tmp_path / "bundle"))
    old = in_format_3(manifest_data(copied))
    assert (old["format_version"], old["dialect"]) == (3, former)
    write_data(copied, old)
    after = read_bundle(copied)
    assert after.manifest == read_bundle(original).manifest
    after.verify()


def test_what_is_wrong_in_format_3_is_refused(bundle: Callable[..., Path], tmp_path: Path) -> None:
    copied = Path(shutil.copytree(bundle("gqa-112"), tmp_path / "bundle"))
    old = in_format_3(manifest_data(copied))
    del next(iter(old["budgets"].values()))["batch"]
    write_data(copied, old)
    assert "not of format version 3" in refusal(copied)
    write_data(copied, {**old, "budgets": []})
    assert "not of format version 3" in refusal(copied)
