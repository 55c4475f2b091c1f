"""The profile measures budgets and baselines in turn, and counts what it says it counts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import Answer, Policy, Request, Session, Stream
from sinkprune.contract.errors import BundleError, PromptError, UsageError
from sinkprune.contract.report import ProfileReport, Row, in_order_of_rows, profile_rows
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.policies.profile import PolicyRounds
from sinkprune.runtime.hooks import Observer, Rows
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.profiling.plot import plot_report
from sinkprune.runtime.profiling.profile import EARLIER, ProfileRounds
from sinkprune.runtime.profiling.rate import RateRun, frame_clock
from sinkprune.runtime.steps.answer import OF_TTFT, PARTS
from support.models.manifests import manifest_data, write_data
from support.programs.commands import run, without_notes


def profiled(
    pipe: Pipeline,
    pictures: Any,
    prompt: Any,
    budgets: list[str],
    *,
    repeat: int = 5,
    warmup: int = 1,
    on_run: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> ProfileReport:
    rounds = ProfileRounds(pipe, pictures, prompt, budgets, **{"method": "sinkpruner", "new_tokens": 16, **options})
    rounds.measure(repeat, warmup, on_run)
    return rounds.report()


def test_budgets_take_turns_and_each_round_starts_with_another(
    pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    order: list[str] = []
    names = ["none", "retain-64", "retain-32"]
    profiled(pipeline("gqa-112"), photo, "What?", names, new_tokens=2, repeat=3, warmup=1, on_run=order.append)
    rounds = [order[start : start + 3] for start in range(0, len(order), 3)]
    assert len(rounds) == 4
    assert all(sorted(turn) == sorted(names) for turn in rounds)
    assert {turn[0] for turn in rounds[1:]} == set(names)


def test_warm_up_is_not_counted(pipeline: Callable[..., Pipeline], photo: Image.Image) -> None:
    report = profiled(pipeline("gqa-112"), photo, "What?", ["retain-64"], new_tokens=3, repeat=1, warmup=2)
    for budget in report.budgets.values():
        for spread in budget.ms.values():
            assert spread is not None
            assert spread.median == spread.p95


def test_stages_are_watched_when_all_engines_have_run(
    pipeline: Callable[..., Pipeline], photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, generate = list[bool](), Pipeline.generate

    def noting(self: Pipeline, *arguments: Any, observer: Any, **options: Any) -> Answer:
        watched.append(observer.watching)
        return generate(self, *arguments, observer=observer, **options)

    monkeypatch.setattr(Pipeline, "generate", noting)
    report = profiled(pipeline("gqa-112"), photo, "What?", ["retain-64"], new_tokens=2, repeat=2, warmup=1)
    assert watched == [False] * 2 + [True] * 2 + [False] * 2
    assert all(budget.stage_peak_rss_bytes for budget in report.budgets.values())


@pytest.mark.parametrize("prompt", ["What?", ["First:", "And second:", "What?"]])
def test_warm_runs_reuse_the_pictures_of_a_question_before(
    prompt: str | list[str], pipeline: Callable[..., Pipeline], photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, int, int]] = []
    answer = Pipeline.answer

    def recorded(self: Pipeline, request: Request, observer: Observer, new_rows: Callable[[], Rows] = Rows) -> Stream:
        stream = answer(self, request, observer, new_rows)
        found.append((request.texts[-1], stream.rest().reused_towers, request.max_new_tokens))
        return stream

    pictures = photo if isinstance(prompt, str) else [photo, photo.rotate(90)]
    count = len(pictures) if isinstance(pictures, list) else 1
    pipe = pipeline("gqa-112", "fp32", max_images=count)
    monkeypatch.setattr(Pipeline, "answer", recorded)
    report = profiled(pipe, pictures, prompt, ["retain-64"], new_tokens=2, repeat=2, warmup=1, new_session=Session)
    assert found == [("What?", 0, 2), (EARLIER, 0, 1), ("What?", count, 1)] * 6
    for budget in report.budgets.values():
        assert budget.warm_ttft_ms is not None and 0 < budget.warm_ttft_ms.median <= budget.warm_ttft_ms.p95
    alone = profiled(pipe, pictures, prompt, ["retain-64"], new_tokens=2, repeat=1, warmup=0)
    assert alone.budgets["retain-64"].warm_ttft_ms is None


def test_nonsense_repetitions_are_refused(pipeline: Callable[..., Pipeline], photo: Image.Image) -> None:
    with pytest.raises(UsageError, match=r"^repeat is 0, expected a whole number from 1 to 100000\.$"):
        profiled(pipeline("gqa-112"), photo, "What?", [], repeat=0)
    with pytest.raises(UsageError, match=r"^warmup is -1, expected a whole number from 0 to 100000\.$"):
        profiled(pipeline("gqa-112"), photo, "What?", [], warmup=-1)
    with pytest.raises(UsageError, match="max_new_tokens is 0"):
        profiled(pipeline("gqa-112"), photo, "What?", [], new_tokens=0)


def test_nothing_of_the_time_to_the_first_token_is_unaccounted_for(
    pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    answer = pipeline("gqa-112").generate(photo, "What?", budget="retain-64", max_new_tokens=2)
    parts = [answer.ms[part] for part in OF_TTFT]
    assert all(part is not None and part > 0 for part in parts)
    assert sum(part or 0.0 for part in parts) == pytest.approx(answer.ms["ttft"])
    assert set(PARTS) - set(OF_TTFT) == {"select", "ttft", "per_token", "latency"}


def test_a_length_that_one_budget_does_not_take_is_refused_before_any_runs(
    pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    pipe, ran = pipeline("gqa-112"), list[str]()
    positions = pipe.bundle.manifest.language_model.max_positions
    text = pipe.prompts.encode(["", "What?"]).text_tokens
    unpruned = pipe.generate(photo, "What?", max_new_tokens=1).visual_tokens
    left = positions - text - unpruned
    # Fits at retain-32, and not unpruned.
    said = rf"{text} text tokens, {unpruned} visual tokens and up to {left + 1} .* ask for at most {left} new tokens"
    with pytest.raises(PromptError, match=said):
        profiled(pipe, photo, "What?", ["retain-32"], new_tokens=left + 1, on_run=ran.append)
    with pytest.raises(PromptError, match=f"ask for at most {left} new tokens"):
        RateRun(pipe, [photo], "What?", ["retain-32", "none"], frame_clock(1, 1), new_tokens=left + 1)
    assert ran == []


@pytest.mark.parametrize("complete", [0, 2])
def test_an_interrupted_command_reports_the_complete_rounds(
    complete: int, bundle: Callable[..., Path], photo: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two budgets, a round of warm-up, and one run of the next round.
    left, generate = iter(range(2 * (1 + complete) + 1)), Pipeline.generate

    def interrupted(*arguments: Any, **options: Any) -> Answer:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return generate(*arguments, **options)

    photo.save(tmp_path / "photo.png")
    monkeypatch.setattr(Pipeline, "generate", interrupted)
    options = ("--budgets", "retain-64", "--repeat", 4, "--new-tokens", 2, "--json", tmp_path / "x.json")
    outcome = run(
        "sinkprune-profile", bundle("gqa-112"), "--image", tmp_path / "photo.png", "--prompt", "What?", *options
    )
    assert outcome.code == 130
    if complete:
        assert outcome.stderr.endswith("interrupted; the report counts 2 of 4 rounds.\n")
        report = json.loads((tmp_path / "x.json").read_text())
        # The photo is 600x400.
        assert (report["repeat"], report["seen_share"]) == (2, [pytest.approx(2 / 3, abs=0.01)])
        assert "median (95th percentile) of 2 interleaved runs" in outcome.stdout
        assert report["interrupted"] == "the report counts 2 of 4 rounds."
    else:
        assert without_notes(outcome.stderr) == "interrupted; no whole round was measured, so nothing was kept.\n"
        assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("told", [0, 5, 8])
def test_a_stage_that_keeps_others_than_told_is_refused(
    told: int, bundle: Callable[..., Path], photo: Image.Image, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(bundle("gqa-112", "fp32", ("retain-64",)), tmp_path / "bundle"))
    data = manifest_data(root)
    counts = data["plans"]["sinkpruner"]["retain-64"]["counts"]
    assert counts["stages"] != [told]
    counts["stages"] = [told]
    write_data(root, data)
    with pytest.raises(BundleError, match=r"kept \d+ visual tokens, the bundle says \d+"):
        Pipeline.load(root).generate(photo, "What is this?", budget="retain-64", max_new_tokens=1)


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
