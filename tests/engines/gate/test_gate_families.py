"""The gate on graphs of other families, and on several pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.programs.commands import assert_refused, run


def checked(source: Path, photos: list[Path], folder: Path) -> dict[str, Any]:
    """Build engines, check them, and return the report."""
    engines = folder / "engines"
    outcome = run("sinkprune-build", source, "-o", engines, "--target", "openvino", "--max-images", len(photos))
    assert outcome.code == 0, outcome.stderr
    images = [word for photo in photos for word in ("--image", photo)]
    outcome = run("sinkprune-check", source, engines, *images, "--json")
    assert outcome.code == 0, outcome.stderr
    report: dict[str, Any] = json.loads(outcome.stdout)
    return report


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("qwen", "prune-80"),
        pytest.param("qwen2-vl", "prune-80", marks=pytest.mark.slow),
        pytest.param("next-mistral", "retain-160", marks=pytest.mark.slow),
    ],
)
def test_honest_engines_of_every_family(
    name: str, budget: str, bundle: Callable[..., Path], photo_file: Path, tmp_path: Path
) -> None:
    report = checked(bundle(name, "fp32", (budget,)), [photo_file], tmp_path)
    assert report["passed"] is True
    assert [text["budget"] for text in report["texts"]] == ["none", budget]
    assert f"sinkpruner/{budget}/sanitizer" in report["graphs"]
    # Unpruned all are kept, of every group.
    assert report["texts"][0]["kept_alike"] == 1


@pytest.mark.slow
def test_two_pictures(bundle: Callable[..., Path], photo_file: Path, tmp_path: Path) -> None:
    source = bundle("gqa-112", "fp32", ("retain-64",), max_images=2)
    report = checked(source, [photo_file, photo_file], tmp_path)
    assert report["passed"] is True
    # The same picture twice is seen once.
    assert report["graphs"]["vision"]["calls"] == 1
    ask = [word for _ in range(3) for word in ("--image", photo_file)]
    assert_refused(run("sinkprune-check", source, tmp_path / "engines", *ask), "expected at most 2")
