"""`sinkprune-check`: its output, its refusals, and TensorRT engines on fakes of the library."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import Answer
from sinkprune.contract.bundle import read_bundle
from sinkprune.engines.gate.recording import GateQuestion
from sinkprune.engines.gate.report import rounding_of
from sinkprune.runtime.pipeline import Pipeline
from support.programs.commands import assert_refused, run
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
    made: dict[str, Path] = {}

    def get(target: str) -> Path:
        if target not in made:
            made[target] = tmp_path_factory.mktemp("checked") / target
            outcome = run("sinkprune-build", source, "-o", made[target], "--target", target)
            assert outcome.code == 0, outcome.stderr
        return made[target]

    return get


@pytest.mark.parametrize(
    ("compute", "vision", "others"),
    [
        ("fp32", "fp32", "fp32"),
        ("the graphs' types", "fp32", "fp32"),
        ("bf16", "bf16", "bf16"),
        ("fp16, int8 where openvino finds it faster", "fp16", "fp16"),
        ("bf16, int8 where openvino finds it faster", "bf16", "bf16"),
        ("the graphs' types; vision in bf16", "bf16", "fp32"),
    ],
)
def test_limits_follow_the_types_of_the_backend(compute: str, vision: str, others: str, source: Path) -> None:
    manifest = read_bundle(source).manifest
    for graph in manifest.graphs:
        expected = "fp32" if "/" in graph else vision if graph == "vision" else others
        assert rounding_of(graph, manifest, compute) == expected, graph


@pytest.mark.parametrize(
    "target", slow_except({"onnxruntime+openvino"}, ["onnxruntime", "onnxruntime+openvino", "openvino"])
)
def test_honest_engines(target: str, source: Path, built: Built, photo_file: Path) -> None:
    command = (source, built(target), "--image", photo_file)
    outcome = run("sinkprune-check", *command)
    assert outcome.code == 0, outcome.stderr
    assert "REJECTED" not in outcome.stdout
    graphs = len(read_bundle(source).manifest.graphs)
    # Engines that compute in bf16 on this processor may rightly keep other tokens.
    assert outcome.stdout.count("passed") + outcome.stdout.count("not judged") == graphs + 3
    free = r"(; 1 of them kept other tokens and has no limit)?"
    assert re.search(rf"\npassed: {graphs} engines, 2 answers{free}\n$", outcome.stdout)
    assert f"{photo_file}: {MIDDLE}\n" in outcome.stderr
    report = json.loads(run("sinkprune-check", *command, "--prompt", "What?", "--json").stdout)
    assert report["passed"] is True
    assert report["target"] == target
    assert set(report["graphs"]["vision"]["outputs"]) == {"tokens", "norms", "salience"}
    assert set(report["graphs"]["vision"]["outputs"]["norms"]) == {
        *("kind", "typical", "worst", "typical_limit", "worst_limit", "ties", "passed")
    }
    assert [text["same_tokens"] <= text["tokens"] for text in report["texts"]] == [True, True]


def test_questions_respect_the_limits_of_engines(source: Path, photo_file: Path, tmp_path: Path) -> None:
    engines = tmp_path / "engines"
    build = ("sinkprune-build", source, "-o", engines, "--target", "onnxruntime", "--check", photo_file)
    limits = ("--max-prompt", 16, "--max-new-tokens", 3)
    long = "word " * 20
    assert_refused(run(*build, *limits, "--check-prompt", long), "text tokens", "take 16", "--check-prompt", "--max-")
    assert not engines.exists()
    built = run(*build, *limits, "--check-prompt", "Why?")
    assert (built.code, "check passed" in built.stdout) == (0, True), built.stderr
    check = ("sinkprune-check", source, engines, "--image", photo_file, "--json")
    report = json.loads(run(*check, "--prompt", "Why?").stdout)
    assert [text["tokens"] for text in report["texts"]] == [3, 3]
    assert_refused(run(*check, "--prompt", long), "text tokens", "take 16", "check --prompt")


def test_a_refusal_names_graph_output_limit_and_what_to_try(
    source: Path, built: Built, photo_file: Path, tmp_path: Path
) -> None:
    planted = plant(read_bundle(source), built("onnxruntime"), "vision", swapped("norms", "salience"), tmp_path)
    outcome = run("sinkprune-check", source, planted, "--image", photo_file)
    assert outcome.code == 2
    assert outcome.stdout.count("REJECTED") == 1
    assert "passed:" not in outcome.stdout
    note, error = outcome.stderr.splitlines()
    assert note == f"{photo_file}: {MIDDLE}" and error.startswith("error: ")
    for said in ("error: the engine of graph 'vision', by onnxruntime", "'norms'", "may by 0.0001", "Build again"):
        assert said in outcome.stderr
    report = json.loads(run("sinkprune-check", source, planted, "--image", photo_file, "--json").stdout)
    assert report["passed"] is False
    assert report["texts"] == []
    assert {
        name for name, own in report["graphs"].items() for out in own["outputs"].values() if not out["passed"]
    } == {"vision"}


def test_what_is_not_finite_is_null_in_json(source: Path, built: Built, photo_file: Path, tmp_path: Path) -> None:
    fault = overflowing("logits", saturating=False)
    planted = plant(read_bundle(source), built("onnxruntime"), "head", fault, tmp_path)
    outcome = run("sinkprune-check", source, planted, "--image", photo_file, "--json")
    assert outcome.code == 2
    assert "not finite" in outcome.stderr and "65504" in outcome.stderr
    assert json.loads(outcome.stdout)["graphs"]["head"]["outputs"]["logits"]["worst"] is None


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
    wide = ("--image", tmp_path / "wide.png")
    check = ("sinkprune-check", source, built("onnxruntime"), *wide)
    checked = run(*check, "--fit", "pad", "--threads", 1, "--json")
    assert checked.code == 0 and json.loads(checked.stdout)["seen_share"] == [1]
    assert shares == {1.0}
    build = ("sinkprune-build", source, "-o", tmp_path / "engines", "--target", "onnxruntime")
    # The names that sinkprune-check has for the picture and the question.
    outcome = run(*build, *wide, "--prompt", "What?", "--fit", "stretch")
    assert outcome.code == 0 and "check passed" in outcome.stdout, outcome.stderr
    assert shares == {1.0}
    printed = [run(*build, "--force", *wide, "--json"), run(*build, "--force", "--json")]
    assert [json.loads(outcome.stdout)["seen_share"] for outcome in printed] == [[0.5], []]
    shares.clear()
    assert_refused(run(*build, "--force", "--fit", "pad"), "--fit is how the picture of --check", "Add --check")
    cropped = run(*check, "--json")
    assert cropped.code == 0 and json.loads(cropped.stdout)["seen_share"] == [0.5]
    assert shares == {0.5}


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
    many = {"max_images": pictures} if pictures > 1 else {}
    source, engines = bundle(name, "fp32", (budget,), **many), tmp_path / "engines"
    outcome = run("sinkprune-build", source, "-o", engines, "--target", "openvino", "--max-images", pictures)
    assert outcome.code == 0, outcome.stderr
    picture = ("--image", photo_file)
    outcome = run("sinkprune-check", source, engines, *picture * pictures, "--json")
    assert outcome.code == 0, outcome.stderr
    report = json.loads(outcome.stdout)
    assert report["passed"] is True
    assert [text["budget"] for text in report["texts"]] == ["none", budget]
    assert f"sinkpruner/{budget}/sanitizer" in report["graphs"]
    # Unpruned all are kept, of every group. The same picture twice is seen once.
    assert report["texts"][0]["kept_alike"] == report["graphs"]["vision"]["calls"] == 1
    if pictures > 1:
        assert_refused(run("sinkprune-check", source, engines, *picture * (pictures + 1)), "expected at most 2")
