"""A disk that is full once all is measured: results are printed and written, and the error names the place."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.programs.commands import run

Bundles = Callable[..., Path]
FREE = "Free space, or choose a place you may read and write."
_MOST_BYTES = 64
_MOST_OF_REPORTS = 28 << 10
"""Reports and graphs that prune have fewer bytes, and a manifest and a picture more."""


@contextmanager
def full_disk(most: int = _MOST_BYTES) -> Iterator[None]:
    """No file may grow longer than `most` bytes: writing fails as on a full disk, with another error number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_was_measured_is_printed(
    bundle: Bundles, scenes: Path, photo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own, data = bundle("gqa-112", budgets=("retain-64",)), ("--data", scenes, "--limit", 3)
    asked = ("--image", photo_file, "--prompt", "What?", "--repeat", 1, "--new-tokens", 2)
    for command, words, refused, printed in (
        # Of two errors the first is printed; the plot is the first output.
        (("sinkprune-profile",), (*asked, "--json", "x.json", "--plot", "y.png"), "y.png", "retain-64"),
        (("sinkprune-evaluate",), (*data, "--answers", "x.jsonl"), "x.jsonl", "retain-64"),
        (("sinkprune-calibrate", "norms"), (*data, "--json", "x.json"), "x.json", "median"),
    ):
        with full_disk():
            outcome = run(*command, own, *words)
        assert outcome.code == 2 and printed in outcome.stdout
        assert outcome.stderr.endswith(f"error: the system refused '{refused}': File too large. {FREE}\n")
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kept", [True, False])
def test_norms_outlive_heat_maps_that_cannot_be_drawn(
    kept: bool, bundle: Bundles, scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps, report = tmp_path / "maps", tmp_path / "norms.json"
    if kept:
        maps.mkdir()
    words = ("--data", scenes, "--heatmaps", maps, "--json", report)
    with full_disk(_MOST_OF_REPORTS):
        outcome = run("sinkprune-calibrate", "norms", bundle("gqa-112"), *words)
    assert outcome.code == 2 and "2 pictures" in outcome.stdout
    (line,) = [line for line in outcome.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: the system refused '{maps}/001-") and line.endswith(f": File too large. {FREE}")
    assert "maps\n" not in outcome.stderr
    assert json.loads(report.read_bytes())["pictures"] == 2
    # A folder that was there stays.
    assert [path.name for path in tmp_path.iterdir() if path != report] == ["maps"] * kept
