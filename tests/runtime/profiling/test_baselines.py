"""A profile measures a smaller picture, the cheapest baseline, in the same rounds where the bundle has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from sinkprune import Pipeline, Policy
from sinkprune.contract.report import Row, in_order_of_rows, profile_rows
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.policies.profile import PolicyRounds
from sinkprune.runtime.profiling.plot import plot_report
from sinkprune.runtime.profiling.profile import ProfileRounds
from sinkprune.serving.sessions import Session

STATE = (0.5, 0.1, -0.2, 0.3, 0.4)
METHODS = ("sinkpruner", "downsample", "downsample-ttft")


@pytest.fixture(scope="module")
def exported(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A bundle of SinkPruner and of smaller pictures."""

    def export(name: str, methods: tuple[str, ...], budgets: tuple[str, ...], images: int = 1) -> Path:
        output = tmp_path_factory.mktemp("baselines") / name
        export_bundle(
            ExportRequest(str(checkpoint(name)), budgets=budgets, methods=methods, max_images=images), output
        )
        return output

    return export


@pytest.fixture(scope="module")
def varied(exported: Callable[..., Path]) -> Path:
    """The bundle of a model of any resolution."""
    return exported("qwen3-vl", METHODS, ("prune-66.7", "prune-88.9"))


def test_rows_are_the_unpruned_engines_then_baselines_then_the_method() -> None:
    plans = {"fastv": {"a", "b"}, "downsample-ttft": {"a"}, "downsample": {"a", "b", "c"}}
    assert profile_rows(plans, "fastv", ["b", "none", "a", "b"]) == [
        Row("fastv", "none"),
        Row("downsample", "b"),
        Row("downsample", "a"),
        Row("downsample-ttft", "a"),
        Row("fastv", "b"),
        Row("fastv", "a"),
    ]
    assert profile_rows(plans, "downsample-ttft", ["a"]) == [
        Row("downsample-ttft", "none"),
        Row("downsample-ttft", "a"),
    ]
    assert profile_rows({"fastv": {"a"}}, "fastv", ["none"]) == [Row("fastv", "none")]
    assert in_order_of_rows(["random", "downsample-ttft", "a"]) == ["downsample-ttft", "random", "a"]


def test_baselines_run_in_the_same_rounds(varied: Path, photo: Image.Image) -> None:
    pipe, order = Pipeline.load(varied), list[str]()
    options = {"method": "sinkpruner", "new_tokens": 2, "new_session": Session}
    rounds = ProfileRounds(pipe, photo, "What?", ["prune-88.9"], **options)
    rounds.measure(2, 0, order.append)
    report = rounds.report()
    assert order == ["none", *["prune-88.9"] * 3, *["prune-88.9"] * 3, "none"]
    assert (report.method, rounds.kinds, list(report.budgets)) == ("sinkpruner", 4, ["none", "prune-88.9"])
    assert {name: list(each) for name, each in report.baselines.items()} == {
        name: ["prune-88.9"] for name in METHODS[1:]
    }
    assert list(report.rows()) == ["none", "downsample prune-88.9", "downsample-ttft prune-88.9", "prune-88.9"]
    own, smaller = report.budgets["prune-88.9"], report.baselines["downsample"]["prune-88.9"]
    alone = pipe.generate(photo, "What?", budget="prune-88.9", method="downsample", max_new_tokens=2)
    assert smaller.tokens_per_layer == tuple(alone.tokens_per_layer)
    assert len(set(smaller.tokens_per_layer)) == 1 < len(set(own.tokens_per_layer))
    # The tower works less too, which pruning does not change.
    assert smaller.flops.ttft - smaller.flops.prefill < own.flops.ttft - own.flops.prefill
    assert smaller.warm_ttft_ms is not None
    assert plot_report(report, ".png").startswith(b"\x89PNG")


def test_a_policy_s_baseline_runs_at_each_number_of_steps(exported: Callable[..., Path], photo: Image.Image) -> None:
    policy = Policy.load(exported("pi0", METHODS[:2], ("prune-77.8",), 2))
    rounds = PolicyRounds(policy, [photo, None], "go", STATE, ["prune-77.8"], [3, 2], method="sinkpruner")
    rounds.measure(1, 0, lambda _: None)
    report = rounds.report()
    assert (rounds.kinds, list(report.rows())) == (6, ["none", "downsample prune-77.8", "prune-77.8"])
    smaller = report.baselines["downsample"]["prune-77.8"]
    assert list(smaller.chunks) == ["3", "2"] and len(set(smaller.tokens_per_layer)) == 1
