"""Plans whose counts vary by picture, in `bundle.json`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from sinkprune.contract.budgets import Share
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BundleError
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import MANIFEST
from sinkprune.contract.plans import Evidence, Plan
from sinkprune.contract.schedule import schedule
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.families import load_family
from support.references.steps import layout_of


@pytest.fixture(scope="module")
def original(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plans") / "bundle"
    export_bundle(ExportRequest(str(checkpoint("gqa-112")), ("retain-64",), ("sinkpruner", "occamtoken")), root)
    return root


def plan_of(root: Path) -> Plan:
    return read_bundle(root).manifest.plans["occamtoken"]["retain-64"]


def test_only_plans_with_evidence_have_the_field(original: Path) -> None:
    plans = json.loads((original / MANIFEST).read_text("utf-8"))["plans"]
    assert "evidence" not in plans["sinkpruner"]["retain-64"]
    assert plans["occamtoken"]["retain-64"]["evidence"]["thresholds"] is None
    plan = plan_of(original)
    names = ["evidence", "sanitizer", "evidence_after_4", "select_after_4"]
    assert plan.graphs == [f"occamtoken/retain-64/{name}" for name in names]
    assert plan.evidence is not None
    with pytest.raises(ValueError, match="not calibrated"):
        plan.evidence.test(0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"graphs": []}, "has 0 graphs of evidence, expected 2"),
        ({"aims": [{"numerator": 1, "denominator": 4}]}, "has 1 aims of evidence, expected 2"),
        ({"thresholds": [1.0]}, "has 1 thresholds of evidence, expected 2"),
        ({"thresholds": [1.0, -2.0]}, "thresholds"),
        ({"thresholds": [1.0, 1e39]}, "thresholds"),
        ({"graphs": ["head", "occamtoken/retain-64/evidence_after_4"]}, "graph 'head'"),
        ({"graphs": ["occamtoken/retain-64/evidence", "nothing"]}, "lacks the graph 'nothing'"),
        (None, "its output is kept_tokens"),
    ],
)
def test_contradictions_are_refused(change: Any, said: str, original: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(original, tmp_path / "bundle"))
    data = json.loads((root / MANIFEST).read_text("utf-8"))
    plan = data["plans"]["occamtoken"]["retain-64"]
    if change is None:
        del plan["evidence"]
        plan["counts"], plan["shares"] = {"outliers": 1, "sink": 1, "reserve": 63, "diverse": 0, "stages": [64]}, None
    else:
        plan["evidence"] |= change
    (root / MANIFEST).write_text(json.dumps(data), "utf-8")
    with pytest.raises(BundleError, match=said):
        read_bundle(root)


def test_a_schedule_is_an_upper_bound_until_the_counts_are_known(original: Path) -> None:
    manifest = read_bundle(original).manifest
    layouts: list[VisualLayout] = [layout_of(load_family(manifest), (64, 64))] * 2
    bound = schedule(manifest, "occamtoken", "retain-64", layouts)
    assert bound.per_layer(8) == [128] * 8
    known = bound.with_rows([9, 20])
    assert known.per_layer(8) == [29] * 8
    assert [picture.counts and picture.counts.kept for picture in known.pictures] == [9, 20]
    left = known.with_left(4, [1, 7])
    assert left.per_layer(8) == [29] * 5 + [8] * 3 and left.kept_after(4) == [1, 7]
    assert bound.per_layer(8) == [128] * 8
    # Other plans have counts that are known.
    fixed = schedule(manifest, "sinkpruner", "retain-64", layouts)
    assert fixed.with_rows([1, 1]) == fixed


def test_the_aimed_mean_counts_layers() -> None:
    evidence = Evidence(("a", "b"), (Share(1, 4), Share(1, 16)), None)
    assert evidence.aimed_mean(64, [4], 8) == Fraction(16 * 5 + 4 * 3, 8)
    assert Evidence(("a",), (Share(1, 4),), None).aimed_mean(64, [], 8) == 16
