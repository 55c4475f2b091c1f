"""The benchmark of deadlines counts what was in time, and finds reports that are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from deadlines import Asked, in_words, main, measure
from sinkprune.contract.progress import unreported


def test_requests_are_counted_by_the_clock_and_by_their_report() -> None:
    alone = iter([*[10.0] * 4, *[10.0, 13.0, 10.0, 10.0]])
    # In time; late and reported so; late and reported to be in time; in time and shorter than expected.
    hurried = iter(
        [
            Asked(9.0, "none", SimpleNamespace(met=True), 10.0),
            Asked(15.0, "none", SimpleNamespace(met=False), 10.0),
            Asked(15.0, "retain-64", SimpleNamespace(met=True), 15.0),
            Asked(5.0, "none", SimpleNamespace(met=True), None),
        ]
    )

    def ask(seed: int, budget: str, deadline_ms: float | None) -> Asked:
        assert (budget, deadline_ms) in (("retain-32", None), ("none", pytest.approx(12.0)))
        return Asked(next(alone), budget, None, None) if deadline_ms is None else next(hurried)

    (row,) = measure(ask, "retain-32", [1.2], 4, unreported)
    assert row["met"] == row["met_by_smallest"] == 0.75
    assert row["wrong"] == 1
    assert row["measured_over_expected"][0] == pytest.approx(1.0)
    assert row["ran"] == {"none": 3, "retain-64": 1}
    line = "| none | 12 | 75.0% | 75.0% | 1 | 1.00 (0.91 to 1.45) | 3 none, 1 retain-64 |\n"
    assert in_words("none", row) == line


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["answers", "chunks"])
def test_bundles_of_both_kinds(
    kind: str,
    bundle: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = bundle("gqa-112") if kind == "answers" else bundle("pi0-bare")
    short = ["--requests", "2", "--factors", "5", "--load", "1,0.1,0.1"]
    assert main([str(path), *short, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_bytes())
    assert list(found) == ["none", "1 x 0.1 s on, 0.1 s off"]
    for (row,) in found.values():
        assert (row["requests"], row["wrong"], sum(row["ran"].values())) == (2, 0, 2)
    assert len(capsys.readouterr().out.splitlines()) == 5
