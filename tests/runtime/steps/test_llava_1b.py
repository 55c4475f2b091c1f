"""The promises made on the 1.1 B preset, fp32: efficiency, selection cost, TTFT, memory. `make test-slow`, minutes.

The same figures, by hand: the README's benchmark commands.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.programs.commands import BIN, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bundle_1b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llava-1.1b") / "bundle"
    budgets = ("--budgets", "retain-128,retain-64")
    assert run("sinkprune-export", "llava-1.1b", "--random-weights", "-o", path, *budgets).code == 0
    return path


@pytest.fixture(scope="module")
def report(bundle_1b: Path, photo_file: Path) -> dict[str, Any]:
    path = bundle_1b.parent / "profile.json"
    question = ("--prompt", "What is in the cup, and what lies on the saucer?")
    budgets = ("--budgets", "none,retain-128,retain-64", "--repeat", "7", "--new-tokens", "4")
    # In a process of its own: torch and what other tests left are not to be counted as memory.
    command = [BIN / "sinkprune-profile", bundle_1b, "--image", photo_file, *question, *budgets, "--json", path]
    subprocess.run(command, check=True, capture_output=True)
    budgets_report: dict[str, Any] = json.loads(path.read_text())["budgets"]
    return budgets_report


@pytest.mark.parametrize(("budget", "least"), [("retain-128", 0.85), ("retain-64", 0.80)])
def test_prefill_efficiency(budget: str, least: float, report: dict[str, Any]) -> None:
    assert report[budget]["efficiency"]["prefill"] >= least


@pytest.mark.parametrize("budget", ["retain-128", "retain-64"])
def test_selection_costs_half_a_percent_of_the_unpruned_prefill(budget: str, report: dict[str, Any]) -> None:
    ms = report[budget]["ms"]
    selection = ms["sanitizer"]["median"] + ms["select"]["median"]
    assert selection <= 0.005 * report["none"]["ms"]["prefill"]["median"]


def test_time_to_first_token(report: dict[str, Any]) -> None:
    assert report["retain-64"]["ms"]["ttft"]["median"] <= 0.45 * report["none"]["ms"]["ttft"]["median"]


def test_weights_are_in_memory_once(bundle_1b: Path, report: dict[str, Any]) -> None:
    weights = sum(path.stat().st_size for path in (bundle_1b / "graphs/weights").iterdir())
    assert max(budget["peak_rss_bytes"] for budget in report.values()) < 1.3 * weights
