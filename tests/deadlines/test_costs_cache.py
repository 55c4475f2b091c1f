"""Costs that a process leaves for the next one, with their age and the load they were measured under."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import ANY

import pytest
from PIL import Image

from sinkprune import CostsWarning, Pipeline
from sinkprune.contract.errors import UsageError
from sinkprune.deadlines.costs import Costs, RecentRatios, cache_costs, cache_file
from sinkprune.deadlines.options import first_budgets
from sinkprune.runtime.profiling import other_load
from sinkprune.runtime.profiling.other_load import OtherLoad
from support.programs.commands import run

Bundles = Callable[..., Path]
QUESTION = "Is there a red circle?"
ASK = ("--fit", "pad", "--prompt", QUESTION, "--max-new-tokens", 2, "--deadline-ms", 60_000)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's cache folder, empty, on a machine that does nothing else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.0)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def measured(bundle: Bundles, photo: Image.Image) -> Pipeline:
    """A pipeline that measured its costs, and could not keep them."""
    pipeline = Pipeline.load(bundle("gqa-112"))
    with warnings.catch_warnings():
        # Other programs may keep this machine busy.
        warnings.simplefilter("ignore", CostsWarning)
        pipeline.warm_up(photo, QUESTION, seconds=0.0)
    assert pipeline.costs is not None
    pipeline.costs = replace(pipeline.costs, load=0.0)
    return pipeline


@pytest.fixture
def warm(measured: Pipeline, cache: Path) -> Pipeline:
    """A pipeline whose costs are in the cache folder."""
    assert cache_costs(costs_of(measured)) is not None
    return measured


def costs_of(pipeline: Pipeline) -> Costs:
    assert pipeline.costs is not None
    return pipeline.costs


def test_a_later_process_needs_no_warm_up(warm: Pipeline, cache: Path, photo: Image.Image) -> None:
    pipeline = Pipeline.load(warm.bundle.path)
    answer = pipeline.generate(photo, QUESTION, deadline_ms=60_000, max_new_tokens=2)
    assert pipeline.costs == warm.costs
    assert answer.deadline is not None and answer.budget == "none"
    assert answer.deadline.costs_load == 0.0
    assert answer.deadline.costs_age_s is not None and 0 <= answer.deadline.costs_age_s < 600
    (file,) = (path for path in cache.rglob("*") if path.is_file())
    assert file.parent == cache / "sinkprune" / "costs"


def test_costs_of_another_backend_are_not_taken(warm: Pipeline, photo: Image.Image) -> None:
    other = Pipeline.load(warm.bundle.path, backend="ort-cpu", compute="fp32", threads=2)
    assert other.place != warm.place
    with pytest.raises(UsageError, match="--warm-up"):
        other.generate(photo, QUESTION, deadline_ms=60_000)
    other.costs = warm.costs
    for use in (partial(other.generate, photo, QUESTION, deadline_ms=60_000), other.save_costs):
        with pytest.raises(UsageError, match=r"^the costs are of another place"):
            use()
    assert Costs.cached(other.place) is None
    # Those of both are kept.
    cache_costs(replace(costs_of(warm), place=other.place))
    assert Costs.cached(other.place) is not None and Costs.cached(warm.place) == warm.costs


@pytest.mark.parametrize("content", ["", "{", '{"costs_version": 9}', "[]"])
def test_a_broken_file_counts_as_none(content: str, warm: Pipeline, photo: Image.Image) -> None:
    file = cache_file(warm.place)
    assert file is not None
    file.write_text(content)
    pipeline = Pipeline.load(warm.bundle.path)
    said = r"are not known\. Their kept file cannot be read; measuring replaces it\. Measure .*--warm-up"
    with pytest.raises(UsageError, match=said):
        pipeline.generate(photo, QUESTION, deadline_ms=60_000)
    if content == "{":
        pipeline.warm_up(photo, QUESTION, seconds=0.0)
        assert Costs.cached(warm.place) == pipeline.costs


@pytest.mark.parametrize("folder", ["", "/dev/null/nowhere"])
def test_without_a_cache_folder_a_process_measures_for_itself_and_warns(
    folder: str, monkeypatch: pytest.MonkeyPatch, bundle: Bundles, photo: Image.Image
) -> None:
    kept = folder or "/dev/null/.cache"
    said = rf"the costs, with the times of .* not be written to '{kept}/.*, so later runs do not find them\. "
    warm = Pipeline.load(bundle("gqa-112"))
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    monkeypatch.setenv("HOME", "/dev/null")
    with pytest.warns(CostsWarning, match=said):
        warm.warm_up(photo, QUESTION, seconds=0.0)
    assert Costs.cached(warm.place) is None
    with pytest.warns(CostsWarning, match=said):
        assert warm.save_costs() is None
    assert warm.generate(photo, QUESTION, deadline_ms=60_000, max_new_tokens=1).budget == "none"


def test_the_command_measures_once_and_expects_what_its_last_runs_took(warm: Pipeline, photo_file: Path) -> None:
    timed = (warm.bundle.path, "--image", photo_file, *ASK)
    outcome = run("sinkprune-run", *timed, "--json")
    assert (outcome.code, outcome.stderr, json.loads(outcome.stdout)["budget"]) == (0, "", "none")
    # As if another program had taken nearly all of the machine while costs were measured
    cache_costs(costs_of(warm).slower(1e6))
    reports = [json.loads(run("sinkprune-run", *timed, "--json").stdout)["deadline"] for _ in range(2)]
    assert [report["can_meet"] for report in reports] == [False, True]
    assert reports[1]["budget"] == "none"
    cached = Costs.cached(warm.place)
    assert cached is not None and replace(cached, recent=RecentRatios()) == costs_of(warm).slower(1e6)
    first, second = cached.recent.first
    assert reports[1]["slower"] == pytest.approx(1.05 * 1.3 * first) and second < 1e-3
    # Then the machine gets ten times as slow as at its slowest.
    cache_costs(replace(cached, recent=RecentRatios((first, second, 10 * first), (1.0,))))
    assert json.loads(run("sinkprune-run", *timed, "--json").stdout)["deadline"]["slower"] > 10 * first


@pytest.mark.parametrize("backend", ["ort-cpu", "openvino"])
def test_first_prefills_correct_no_expected_time(backend: str, bundle: Bundles, photo: Image.Image) -> None:
    """`Chain.first_uses` counts what makes a request slow: loading, a first prefill, on openvino each new length."""
    Pipeline.load(bundle("gqa-112"), backend=backend).warm_up(photo, "What?", seconds=0.0)
    later = Pipeline.load(bundle("gqa-112"), backend=backend)
    later.load_plans("sinkpruner")
    ratios = list[int]()
    asked = (("What?", "none"), ("What?", "none"), ("What is it?", "none"), ("What?", "retain-64"), ("What?", "none"))
    for question, budget in asked:
        later.generate(photo, question, budget=budget, deadline_ms=60_000, max_new_tokens=1)
        ratios.append(len(later._history_of(costs_of(later)).recent.first))
    compiles = backend == "openvino"
    assert ratios == ([0, 1, 1, 1, 2] if compiles else [0, 1, 2, 3, 4])
    # What a command runs before its deadline counts.
    layouts = [*later.family.largest().values()]
    first = first_budgets(later.bundle.manifest, later.backend, "sinkpruner", "retain-64", layouts)
    assert first == (["retain-64", "retain-32"] if compiles else ["retain-32"])


@pytest.mark.parametrize(
    ("load", "said"), [(0.2, ""), (0.6, "took 60 % of the processors. Measure them again with ")]
)
def test_costs_that_are_measured_under_load_are_a_warning(
    load: float, said: str, warm: Pipeline, photo_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = costs_of(warm)
    monkeypatch.setattr(OtherLoad, "share", lambda self: load)
    monkeypatch.setattr("sinkprune.deadlines.pipeline.measure_costs", lambda *_: measured)
    pipeline = Pipeline.load(warm.bundle.path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline.warm_up(photo_file, QUESTION)
    assert [each.category for each in caught] == [CostsWarning] * bool(said)
    assert all(said in str(each.message) and each.filename == __file__ for each in caught)
    assert Costs.cached(warm.place) == pipeline.costs == replace(measured, measured_at=ANY, load=load)
    outcome = run("sinkprune-run", warm.bundle.path, "--image", photo_file, *ASK, "--warm-up")
    assert outcome.code == 0 and "Warning" not in outcome.stderr and said in outcome.stderr
    assert outcome.stderr.splitlines()[bool(said) :] == [f"note: the costs are kept in '{pipeline.save_costs()}'."]


def test_the_load_is_that_of_other_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    stat = tmp_path / "stat"
    monkeypatch.setattr(other_load, "_STAT", stat)
    monkeypatch.setattr(other_load.os, "sysconf", lambda name: 100)
    own = iter([1.0, 3.0])
    monkeypatch.setattr(other_load.os, "times", lambda: type("Times", (), {"user": next(own), "system": 0.0}))
    # user nice system idle iowait irq softirq steal, in hundredths of a second
    # A program bound to processors 1 and 2 meets no load of the others.
    monkeypatch.setattr(other_load.os, "sched_getaffinity", lambda process: {1, 2})
    idle = "cpu2 0 0 0 0 0 0 0 0 0 0\nintr 1 2 3\n"
    stat.write_text(f"cpu  1 1 1 1 1 1 1 1 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\ncpu1 1000 0 0 1000 0 0 0 0 0 0\n{idle}")
    others = OtherLoad()
    moved = "cpu2 200 100 0 200 100 0 0 0 0 0\n"
    stat.write_text(f"cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 9 9 9 9 9 9 9 9 0 0\ncpu1 1100 0 50 1200 0 0 0 50 0 0\n{moved}")
    # Ten seconds of processor time went by: five busy, of which two are this process's.
    assert others.share() == pytest.approx(0.3)


@pytest.mark.parametrize("content", [None, "", "intr 1 2 3\n", "cpu0 1 2\n", "cpu0 a b c d e f g h\n"])
def test_a_system_that_does_not_report_its_load(
    content: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    if content is not None:
        (tmp_path / "stat").write_text(content)
    monkeypatch.setattr(other_load, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(other_load.os, "sched_getaffinity", lambda process: {0})
    assert OtherLoad().share() is None
