"""`sinkprune-check`: its output, its refusals, and TensorRT engines on fakes of the library."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import Answer
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.engines_manifest import read_engines
from sinkprune.engines.gate.recording import GateQuestion
from sinkprune.runtime.pipeline import Pipeline
from support.programs.commands import assert_refused, run, succeed
from support.programs.slow_cases import slow, slow_except
from support.stand_ins.gate_faults import overflowing, plant, swapped

MIDDLE = (
    "the model sees 67 % of the picture (the middle 400x400 of 600x400). --fit pad shows it all (docs/pictures.md)."
)
Built = Callable[[str], Path]


@pytest.fixture(scope="module")
def source(bundle: Callable[..., Path]) -> Path:
    return bundle("gqa-112", budgets=("retain-64",))


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    @cache
    def get(target: str) -> Path:
        engines = tmp_path_factory.mktemp("checked") / target
        succeed("sinkprune-build", source, "-o", engines, "--target", target)
        return engines

    return get


@pytest.mark.parametrize(
    "target", slow_except({"onnxruntime+openvino"}, ["onnxruntime", "onnxruntime+openvino", "openvino"])
)
def test_honest_engines(target: str, source: Path, built: Built, photo_file: Path) -> None:
    command = (source, built(target), "--image", photo_file)
    outcome = succeed("sinkprune-check", *command)
    graphs = len(read_bundle(source).manifest.graphs)
    # Engines that compute in bf16 on this processor may rightly keep other tokens.
    assert outcome.stdout.count("passed") + outcome.stdout.count("not judged") == graphs + 3
    assert f"\npassed: {graphs} engines, 2 answers" in outcome.stdout
    assert f"{photo_file}: {MIDDLE}\n" in outcome.stderr
    report = json.loads(run("sinkprune-check", *command, "--prompt", "What?", "--json").stdout)
    assert (report["passed"], report["target"]) == (True, target)
    assert set(report["graphs"]["vision"]["outputs"]) == {"tokens", "norms", "salience"}
    assert [text["same_tokens"] <= text["tokens"] for text in report["texts"]] == [True, True]


def test_questions_respect_the_limits_of_engines(source: Path, photo_file: Path, tmp_path: Path) -> None:
    engines = tmp_path / "engines"
    limits = ("--target", "onnxruntime", "--max-prompt", 16, "--max-new-tokens", 3)
    build = ("sinkprune-build", source, "-o", engines, "--check", photo_file, *limits, "--check-prompt")
    long = "word " * 20
    assert_refused(run(*build, long), "text tokens", "take 16", "--check-prompt", "--max-")
    assert not engines.exists()
    built = run(*build, "Why?")
    assert built.code == 0 and "check passed: 8 engines\n" in built.stdout, built.stderr
    assert len(read_engines(engines).manifest.flags["checked"]) == 64
    check = ("sinkprune-check", source, engines, "--image", photo_file, "--json", "--prompt")
    assert [text["tokens"] for text in json.loads(run(*check, "Why?").stdout)["texts"]] == [3, 3]
    assert_refused(run(*check, long), "text tokens", "take 16", "check --prompt")


def test_a_refusal_names_graph_output_limit_and_what_to_try(
    source: Path, built: Built, photo_file: Path, tmp_path: Path
) -> None:
    check = ("--image", photo_file)
    engines, bundle = built("onnxruntime"), read_bundle(source)
    planted = plant(bundle, engines, "vision", swapped("norms", "salience"), tmp_path)
    outcome = run("sinkprune-check", source, planted, *check)
    assert outcome.code == 2
    assert outcome.stdout.count("REJECTED") == 1 and "passed:" not in outcome.stdout
    note, error = outcome.stderr.splitlines()
    assert note == f"{photo_file}: {MIDDLE}"
    assert error.startswith("error: the engine of graph 'vision', by onnxruntime")
    assert all(said in error for said in ("'norms'", "may by 0.0001", "Build again"))
    # What is not finite is null in JSON.
    (tmp_path / "other").mkdir()
    planted = plant(bundle, engines, "head", overflowing("logits", saturating=False), tmp_path / "other")
    outcome = run("sinkprune-check", source, planted, *check, "--json")
    assert outcome.code == 2 and "not finite" in outcome.stderr and "65504" in outcome.stderr
    report = json.loads(outcome.stdout)
    assert (report["passed"], report["texts"]) == (False, [])
    outputs = {graph: own["outputs"] for graph, own in report["graphs"].items()}
    assert [graph for graph, own in outputs.items() if not all(out["passed"] for out in own.values())] == ["head"]
    assert outputs["head"]["logits"]["worst"] is None


def test_wrong_arguments_are_refused(
    source: Path, bundle: Callable[..., Path], built: Built, photo_file: Path, tmp_path: Path
) -> None:
    engines, ask = built("onnxruntime"), ("--image", photo_file)
    for words, said in (
        ((bundle("gqa-112"), engines, *ask), "were built from another bundle"),
        ((engines, source, *ask), "is a folder of engines"),
        ((source, tmp_path, *ask), "is not a folder of engines"),
        ((source, engines, "--image", tmp_path), str(tmp_path)),
        ((source, engines, *ask, "--prompt", " "), "prompt is empty"),
        ((source, engines, *ask, "--compute", "fp32"), "are built to be fastest"),
    ):
        assert_refused(run("sinkprune-check", *words), said)


def test_the_whole_picture_may_be_compared(
    source: Path, built: Built, photo: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares, answer = set[float](), Pipeline.generate

    def noted(self: Pipeline, *arguments: Any, **options: Any) -> Answer:
        found = answer(self, *arguments, **options)
        shares.update(kept.layout.seen_share for kept in found.images)
        return found

    monkeypatch.setattr(Pipeline, "generate", noted)
    photo.resize((200, 100)).save(tmp_path / "wide.png")
    wide = ("--image", tmp_path / "wide.png", "--json")
    check = ("sinkprune-check", source, built("onnxruntime"), *wide)
    # sinkprune-build takes the names that sinkprune-check has for the picture and the question.
    build = ("sinkprune-build", source, "-o", tmp_path / "engines", "--target", "onnxruntime", *wide)
    for command, share in (
        ((*check, "--fit", "pad", "--threads", 1), 1.0),
        ((*build, "--prompt", "What?", "--fit", "stretch"), 1.0),
        (check, 0.5),
        ((*build, "--force"), 0.5),
    ):
        assert json.loads(succeed(*command).stdout)["seen_share"] == [share]
        assert shares == {share}
        shares.clear()


def test_the_fit_is_part_of_what_was_checked(source: Path, photo: Image.Image) -> None:
    bundle = read_bundle(source)
    sums = {GateQuestion([photo], "What?", 8, fit).sha256(bundle) for fit in (None, "crop", "pad")}
    assert len(sums) == 3


@pytest.mark.parametrize(
    ("name", "budget", "pictures"),
    [
        ("qwen", "prune-80", 1),
        slow(("qwen2-vl", "prune-80", 1)),
        slow(("next-mistral", "retain-160", 1)),
        slow(("gqa-112", "retain-64", 2)),
    ],
)
def test_honest_engines_of_every_family(
    name: str, budget: str, pictures: int, bundle: Callable[..., Path], photo_file: Path, tmp_path: Path
) -> None:
    source, engines = bundle(name, "fp32", (budget,), max_images=pictures), tmp_path / "engines"
    succeed("sinkprune-build", source, "-o", engines, "--target", "openvino", "--max-images", pictures)
    check = ("sinkprune-check", source, engines, "--json")
    report = json.loads(succeed(*check, *("--image", photo_file) * pictures).stdout)
    assert [text["budget"] for text in report["texts"]] == ["none", budget]
    # Unpruned all are kept, of every group. The same picture twice is seen once.
    assert report["texts"][0]["kept_alike"] == report["graphs"]["vision"]["calls"] == 1
    if pictures > 1:
        assert_refused(run(*check, *("--image", photo_file) * (pictures + 1)), "expected at most 2")
