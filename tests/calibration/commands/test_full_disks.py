"""A disk that is full once all is measured: results are printed and written, and the error names the place."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from sinkprune.calibration.commands import schedule as schedule_command
from sinkprune.contract.bundle import read_bundle
from sinkprune.demo.write_scenes import write_scenes
from support.programs.commands import run, schedule

Bundles = Callable[..., Path]
ONE = ("--budgets", "retain-64")
FREE = "Free space, or choose a place you may read and write."
_MOST_BYTES = 64
_MOST_OF_REPORTS = 28 << 10
"""Reports and graphs that prune have fewer bytes, and a manifest and a picture more."""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions about two scenes."""
    folder = tmp_path_factory.mktemp("scenes")
    write_scenes(folder, 2, "validation")
    return folder / "scenes.jsonl"


@contextmanager
def full_disk(most: int = _MOST_BYTES) -> Iterator[None]:
    """No file may grow longer than `most` bytes: writing fails as on a full disk, with another error number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refuse(*_: object) -> NoReturn:
    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), "refused")


@pytest.mark.parametrize("output", ["--json x.json --plot y.png"])
def test_a_profile_is_printed(
    output: str, bundle: Bundles, photo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--image", photo_file, "--prompt", "What?", *ONE, "--repeat", 1, "--new-tokens", 2)
    own = bundle("gqa-112")
    with full_disk():
        outcome = run("sinkprune-profile", own, *words, *output.split())
    assert outcome.code == 2 and "retain-64" in outcome.stdout
    # Of two errors the first is printed; the plot is the first output.
    first = output.split()[-1]
    assert outcome.stderr.endswith(f"error: the system refused '{first}': File too large. {FREE}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (("sinkprune-evaluate", "BUNDLE", *ONE, "--answers", "x.jsonl"), "retain-64"),
        (("sinkprune-calibrate", "attention", "BUNDLE", *ONE, "--heads", "x.json"), "retain-64"),
        (("sinkprune-calibrate", "norms", "BUNDLE", "--json", "x.json"), "median"),
    ],
    ids=["answers", "heads", "norms"],
)
def test_calibrations_are_printed(
    words: tuple[str, ...],
    printed: str,
    bundle: Bundles,
    scenes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    own = bundle("gqa-112", budgets=("retain-64",))
    with full_disk():
        outcome = run(*(own if word == "BUNDLE" else word for word in words), "--data", scenes, "--limit", 3)
    assert outcome.code == 2 and printed in outcome.stdout
    assert outcome.stderr.endswith(f"error: the system refused '{words[-1]}': File too large. {FREE}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_note_of_load", "any_prediction")
@pytest.mark.parametrize("written", [["c.json", "r.json"], ["r.json"]], ids=["bundle", "bundle and costs"])
def test_a_found_budget_outlives_what_cannot_be_written(
    written: list[str], own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, costs, report = read_bundle(own).sha256, tmp_path / "c.json", tmp_path / "r.json"
    if costs.name not in written:
        monkeypatch.setattr(schedule_command, "write_costs", refuse)
    with full_disk(_MOST_OF_REPORTS):
        outcome = schedule(own, "--budget-tokens", 16, "--costs", costs, "--json", report)
    assert outcome.code == 2 and "mean-16: predicted" in outcome.stdout
    assert outcome.stdout.endswith(f"{own}: unchanged\n")
    # Of two errors the first is printed.
    place = str(own) if costs.name in written else "refused"
    assert outcome.stderr.endswith(f"error: the system refused '{place}': File too large. {FREE}\n")
    assert json.loads(report.read_bytes())["sha256"] is None
    assert read_bundle(own).sha256 == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", *written]


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
