"""`sinkprune-act --deadline-ms`: costs are measured once, kept, read from files, and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sinkprune import ActionCosts, Policy, write_costs
from sinkprune.deadlines.costs import cache_file
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.profiling.other_load import OtherLoad
from support.programs.commands import Outcome, assert_refused, run

BUDGETS = ("prune-77.8", "prune-88.9")
Act = Callable[..., Outcome]


@pytest.fixture(scope="module")
def policy(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """A small policy of two cameras and two methods."""
    folder = tmp_path_factory.mktemp("policy") / "bundle"
    request = ExportRequest(str(checkpoint("pi0")), BUDGETS, ("sinkpruner", "random"), max_images=2)
    export_bundle(request, folder)
    return Policy.load(folder)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's cache folder, empty, on a machine that does nothing else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.0)
    return tmp_path / "cache"


@pytest.fixture
def act(policy: Policy, photo_file: Path, measurements: list[str]) -> Act:
    """Runs the command with a deadline of a minute; it measures costs no longer than it must."""

    def command(
        *words: object, cameras: int = 1, deadline: tuple[object, ...] = ("--deadline-ms", 60_000)
    ) -> Outcome:
        given = ["--camera", photo_file, "--camera", photo_file if cameras == 2 else "none"]
        state = ("--instruction", "pick up the cup", "--state", "0,0,0,0,0")
        outcome = run("sinkprune-act", policy.bundle.path, *given, *state, *deadline, *words)
        # The order of the cameras has tests of its own.
        order, end, rest = outcome.stderr.partition("\n")
        return replace(outcome, stderr=rest) if order.startswith("cameras: ") and end else outcome

    return command


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The budgets of every measurement from now on."""
    found, plain = list[str](), Policy.warm_up

    def noting(self: Policy, *given: Any, **options: Any) -> ActionCosts:
        found.append(options["budget"])
        return plain(self, *given, **options, seconds=0.0)

    monkeypatch.setattr(Policy, "warm_up", noting)
    return found


def kept(policy: Policy) -> ActionCosts:
    costs = ActionCosts.cached(policy.place, "sinkpruner")
    assert costs is not None
    return costs


def test_costs_are_measured_once_and_again_if_wanted(act: Act, policy: Policy, measurements: list[str]) -> None:
    assert act().code == 0
    first = kept(policy)
    assert list(first.budgets) == ["none", *BUDGETS] and len(first.recent.first) == 1
    assert act("--json").code == 0
    assert (measurements, len(kept(policy).recent.first)) == (["none"], 2)
    deadline = json.loads(act("--warm-up", "--json").stdout)["chunks"][0]["deadline"]
    assert len(measurements) == 2 and len(kept(policy).recent.first) == 1
    assert 0 <= deadline["costs_age_s"] < 600 and deadline["costs_load"] == 0.0


@pytest.mark.parametrize("changed", [{"cameras": 2}, {"budget": "none"}])
def test_kept_costs_of_other_chunks_are_measured_anew(
    changed: dict[str, Any], act: Act, policy: Policy, measurements: list[str]
) -> None:
    assert act("--budget", "prune-77.8").code == 0
    outcome = act("--budget", changed.get("budget", "prune-77.8"), cameras=changed.get("cameras", 1))
    file = cache_file(policy.place, "sinkpruner")
    of = "" if "budget" in changed else " of 'prune-77.8' and smaller budgets"
    assert (outcome.code, outcome.stderr) == (0, f"note: the costs{of} are kept in '{file}'.\n")
    assert len(measurements) == 2
    assert (kept(policy).frames, "none" in kept(policy).budgets) == (changed.get("cameras", 1), "budget" in changed)


def test_a_file_of_costs_is_read_and_left(act: Act, policy: Policy, measurements: list[str], tmp_path: Path) -> None:
    assert act().code == 0
    file, costs = tmp_path / "costs.json", replace(kept(policy), load=0.125)
    write_costs(file, costs)
    before = file.read_bytes()
    deadline = json.loads(act("--costs", file, "--json").stdout)["chunks"][0]["deadline"]
    assert deadline["costs_load"] == 0.125
    assert file.read_bytes() == before and kept(policy).load == 0.0 and len(kept(policy).recent.first) == 1
    assert len(measurements) == 1
    assert_refused(act("--costs", file, cameras=2), "the costs were measured with 1", "--warm-up")
    write_costs(file, replace(costs, place=replace(policy.place, threads=99)))
    assert_refused(act("--costs", file), "of another place: their 'threads' is 99")
    assert_refused(act("--costs", tmp_path / "none.json"), "none.json")


def test_late_chunks_are_reported_on_stderr(
    act: Act, policy: Policy, measurements: list[str], photo_file: Path, tmp_path: Path
) -> None:
    late = act(deadline=("--deadline-ms", 1))
    assert late.code == 0 and "late:" not in late.stdout
    (line,) = [line for line in late.stderr.splitlines() if line.startswith("late: ")]
    assert " ms where 1 were given, at budget " in line
    assert "No budget was expected to bring a chunk sooner than in " in line
    assert "late:" not in act().stderr
    folder = tmp_path / "frames"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}{photo_file.suffix}").write_bytes(photo_file.read_bytes())
    several = ["--camera", folder, "--camera", "none", "--instruction", "go", "--state", "0,0,0,0,0"]
    found = run("sinkprune-act", policy.bundle.path, *several, "--deadline-ms", 1, "--json")
    assert "late: 3 of 3 chunks; the last of them: " in found.stderr
