"""`sinkprune-build`: its engines, its summary, and its refusals, which leave nothing behind.

A folder of engines runs by itself: moved, read-only, for another user, and in every command.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle, read_runnable
from sinkprune.contract.engines_manifest import ENGINES, Engines, Limits, read_engines
from sinkprune.contract.errors import EnginesError, PromptError, UsageError
from sinkprune.contract.files.manifest_file import file_specs, sha256
from sinkprune.contract.files.trust import Trust
from sinkprune.contract.manifest import BUNDLE_FOLDER
from sinkprune.engines import targets
from sinkprune.engines.progress import TerminalProgress
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.backends.compatibility import open_engines
from support.models.heads_of_64 import export_random
from support.programs.commands import assert_refused, run
from support.programs.slow_cases import slow_except
from support.references.same_answers import assert_equal_at_both_ends

Bundles = Callable[..., Path]

needs_rtx = pytest.mark.skipif(platform.machine() != "x86_64", reason="tensorrt-rtx has wheels for x86-64 only")


def build(source: object, output: Path, *options: object) -> Any:
    """Run the command, and assert that nothing half-written stays."""
    outcome = run("sinkprune-build", source, "-o", output, *options)
    left = sorted(path.name for path in output.parent.iterdir() if output.name in path.name)
    assert left == ([output.name] if outcome.code == 0 else []), "something half-written was left"
    return outcome


def test_folders_have_the_modes_that_the_umask_allows(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """safetensors and ONNX Runtime, which write files of a bundle and of engines, have modes of their own."""
    before = os.umask(0o002)
    try:
        export_bundle(ExportRequest(str(checkpoint("gqa-112")), budgets=("retain-64",)), tmp_path / "bundle")
        assert build(tmp_path / "bundle", tmp_path / "engines", "--target", "onnxruntime").code == 0
    finally:
        os.umask(before)
    for folder in ("bundle", "engines"):
        for path in (tmp_path / folder, *(tmp_path / folder).rglob("*")):
            assert path.stat().st_mode & 0o777 == (0o775 if path.is_dir() else 0o664), path


@pytest.fixture(scope="module")
def optimised(bundle: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Engines]:
    """Return a function that builds a small bundle's models for onnxruntime, and moves them."""
    made: dict[str, Engines] = {}

    def get(precision: str) -> Engines:
        if precision not in made:
            folder = tmp_path_factory.mktemp("optimised")
            outcome = build(bundle("gqa-112", precision), folder / "built", "--target", "onnxruntime")
            assert outcome.code == 0, outcome.stderr
            made[precision] = read_engines(shutil.move(folder / "built", folder / "moved"))
        return made[precision]

    return get


@pytest.fixture(scope="module")
def rtx_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle that tensorrt-rtx builds."""
    return export_random(tmp_path_factory.mktemp("rtx"), budgets=("retain-64",), precision="fp16").path


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_optimised_models_answer_as_the_bundle_does(
    precision: str, bundle: Bundles, optimised: Callable[[str], Engines], photo: Image.Image
) -> None:
    path, engines = bundle("gqa-112", precision), optimised(precision)
    engines.verify()
    assert_equal_at_both_ends(Pipeline.load(path, engines=engines.path), Pipeline.load(path), photo)


def test_optimised_models_are_for_one_processor(
    bundle: Bundles, optimised: Callable[[str], Engines], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = open_engines(optimised("fp32").path, read_bundle(bundle("gqa-112")))
    load_backend("ort-cpu", None, built)
    with pytest.raises(EnginesError, match=r"optimised for provider CPUExecutionProvider, here it is CUDAExec"):
        load_backend("ort-cuda", None, built)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(EnginesError, match=r"optimised for machine .*, here it is riscv64"):
        load_backend("ort-cpu", None, built)


def test_the_manifest_names_the_source_of_engines(bundle: Bundles, optimised: Callable[[str], Engines]) -> None:
    path, manifest = bundle("gqa-112"), optimised("fp32").manifest
    source = read_bundle(path).manifest
    assert (manifest.target, manifest.compute_capabilities) == ("onnxruntime", ())
    assert manifest.bundle_sha256 == sha256(path / "bundle.json")
    assert manifest.checkpoint_sha256 == source.checkpoint.config_sha256
    assert set(manifest.engines) == set(source.graphs)
    nodes = {graph: engine.nodes for graph, engine in manifest.engines.items() if engine.nodes}
    assert set(nodes) == {f"sinkpruner/{budget}/sanitizer" for budget in source.budgets}
    assert all(sorted(found.values()) == ["function", "function"] for found in nodes.values())
    # Defaults limit no engines of any shape.
    assert (manifest.limits, manifest.enforced_limits) == (Limits(480, 480, 1), {})
    assert open_engines(optimised("fp32").path, read_bundle(path)).limits is None


def test_the_summary_as_text_and_as_json(bundle: Bundles, tmp_path: Path) -> None:
    options = ("--target", "onnxruntime", "--max-prompt", 100, "--max-new-tokens", 50)
    outcome = build(bundle("gqa-112"), tmp_path / "a", *options)
    assert "engines" in outcome.stdout
    assert "prompts of 100 tokens, answers of 50" in outcome.stdout
    assert "operators of the sanitizer: 8 run by onnxruntime" in outcome.stdout
    command = f"sinkprune-check {bundle('gqa-112')} {tmp_path / 'a'} --image PICTURE --prompt QUESTION"
    how = f"not checked. Compare the engines with their graphs on the machine that runs them: {command}\n"
    assert how in outcome.stdout
    summary = json.loads(build(bundle("gqa-112"), tmp_path / "b", *options, "--json").stdout)
    assert summary["engines"] == str(tmp_path / "b")
    assert summary["limits"] == {"prompt_tokens": 100, "new_tokens": 50, "images": 1}
    assert summary["enforced_limits"] == ["prompt_tokens", "new_tokens"]
    assert summary["bytes"] == sum(spec.size for spec in read_engines(tmp_path / "b").manifest.files.values())


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_given_limits_hold_on_every_target(
    target: str, bundle: Bundles, photo: Image.Image, photo_file: Path, tmp_path: Path
) -> None:
    options = ("--target", target, "--max-prompt", 32, "--max-new-tokens", 8)
    built = build(bundle("gqa-112"), tmp_path / "engines", *options)
    assert "; prompts of 32 tokens, answers of 8\n" in built.stdout
    pipeline = Pipeline.load(tmp_path / "engines")
    # Without max_new_tokens, an answer may have as many tokens as the engines allow.
    assert len(pipeline.generate(photo, "What is this?", min_new_tokens=8).token_ids) == 8
    asked = run("sinkprune-run", tmp_path / "engines", "--image", photo_file, "--prompt", "What?", "--json")
    assert len(json.loads(asked.stdout)["token_ids"]) <= 8
    with pytest.raises(
        PromptError, match=r"9 new tokens are more than the 8 .* --max-prompt 32 --max-new-tokens 9 added"
    ):
        pipeline.generate(photo, "What is this?", max_new_tokens=9)
    with pytest.raises(PromptError, match=r"than the 32 the engines were built for.* --max-prompt"):
        pipeline.generate(photo, "word " * 40, max_new_tokens=8)


def test_only_engines_are_replaced_and_only_with_force(bundle: Bundles, tmp_path: Path) -> None:
    output, thesis, target = tmp_path / "engines", tmp_path / "thesis", ("--target", "onnxruntime")
    assert build(bundle("gqa-112"), output, *target).code == 0
    before = (output / "engines.json").read_bytes()
    refused = run("sinkprune-build", bundle("gqa-112"), "-o", output, *target)
    assert_refused(refused, f"'{output}' is a folder of engines already. Add --force")
    assert (output / "engines.json").read_bytes() == before
    assert build(bundle("gqa-112"), output, *target, "--max-prompt", 70, "--force").code == 0
    assert read_engines(output).manifest.limits.prompt_tokens == 70
    thesis.mkdir()
    assert_refused(run("sinkprune-build", thesis, "-o", tmp_path / "out", *target), "is not a bundle")
    outcome = run("sinkprune-build", bundle("gqa-112"), "-o", thesis, *target, "--force")
    assert_refused(outcome, "exists and is not a folder of engines", "left as it is")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target", "tensorflow"], "unknown target 'tensorflow'; did you mean 'tensorrt'? Known targets: onnx"),
        (["--target", "onnxruntime", "--sm", "87"], "--sm is for target tensorrt-rtx"),
        (["--target", "tensorrt", "--sm", "87"], "target tensorrt builds for the GPU of this machine"),
        (["--target", "onnxruntime", "--max-prompt", "1000"], "exceed the model's 1024 positions"),
        (["--target", "onnxruntime", "--max-new-tokens", "0"], "--max-new-tokens is 0, expected a whole number"),
        (["--target", "onnxruntime", "--max-images", "3"], "exported for up to 1 in a prompt"),
        (["--target", "onnxruntime", "--check", "a.png", "--image", "b.png"], "--check takes one picture, found 2"),
    ],
)
def test_wrong_arguments_are_refused(options: list[str], said: str, bundle: Bundles, tmp_path: Path) -> None:
    assert_refused(build(bundle("gqa-112"), tmp_path / "engines", *options), said)


def test_an_altered_bundle(bundle: Bundles, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(bundle("gqa-112"), tmp_path / "bundle"))
    weights = copied / "graphs" / "weights" / "head.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    assert_refused(build(copied, tmp_path / "engines", "--target", "onnxruntime"), "head.bin' was altered")


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="tensorrt is installed")
def test_tensorrt_is_missing(bundle: Bundles, tmp_path: Path) -> None:
    outcome = build(bundle("gqa-112", "fp16"), tmp_path / "engines", "--target", "tensorrt")
    assert_refused(outcome, "needs the library tensorrt", "JetPack", "pip install --editable '.[tensorrt]'")


def test_too_little_memory_and_no_room_on_the_disk(
    bundle: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, full = bundle("gqa-112"), shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(targets, "available_bytes", lambda: 100_000_000)
        outcome = build(source, tmp_path / "engines", "--target", "onnxruntime")
    assert_refused(outcome, "not enough memory", "needs about 0.3 GB of memory", "0.1 GB are free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    outcome = build(source, tmp_path / "engines", "--target", "onnxruntime")
    assert_refused(outcome, "no room for the engines", f"'{tmp_path}' has 0 MB free")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_cannot_be_written(bundle: Bundles, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    outcome = build(bundle("gqa-112"), tmp_path / "locked" / "engines", "--target", "onnxruntime")
    assert_refused(outcome, "cannot be written")


def test_a_second_interrupt_does_not_stop_the_clean_up(
    bundle: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, pressed = shutil.rmtree, list[object]()

    def press(*given: object) -> None:
        pressed.append(given)
        signal.raise_signal(signal.SIGINT)

    def interrupted(*given: Any, **options: Any) -> None:
        if pressed:
            press(given)
        remove(*given, **options)

    monkeypatch.setattr(TerminalProgress, "graph", press)
    monkeypatch.setattr(shutil, "rmtree", interrupted)
    outcome = build(bundle("gqa-112"), tmp_path / "engines", "--target", "onnxruntime")
    assert outcome.code == 130
    assert outcome.stderr == "interrupted; no engine was complete, so nothing was kept.\n"
    assert len(pressed) > 1 and not list(tmp_path.iterdir())


@needs_rtx
@pytest.mark.parametrize("moment", ["graph", "phase_start", "step_complete"])
def test_an_interrupt_leaves_nothing(
    moment: str, rtx_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TerminalProgress, moment, interrupt)
    outcome = build(rtx_bundle, tmp_path / "engines", "--target", "tensorrt-rtx", "--sm", "86")
    assert outcome.code == 130
    assert outcome.stderr == "interrupted; no engine was complete, so nothing was kept.\n"


NOBODY = 65534
TARGETS = {"onnxruntime": "ort-cpu", "onnxruntime+openvino": "ort-cpu+openvino", "openvino": "openvino"}
Built = Callable[[str], Path]


@pytest.fixture(scope="module")
def source(bundle: Callable[..., Path]) -> Path:
    return bundle("gqa-112", weights="int8")


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Return a function that builds engines of a small bundle, and moves them from their first folder."""
    made: dict[str, Path] = {}

    def get(target: str) -> Path:
        if target not in made:
            folder = tmp_path_factory.mktemp(f"birthplace-{target}")
            copied = shutil.copytree(source, folder / "bundle-of-birth")
            outcome = run("sinkprune-build", copied, "-o", folder / "engines-of-birth", "--target", target)
            assert outcome.code == 0, outcome.stderr
            moved = tmp_path_factory.mktemp("away") / target
            made[target] = Path(shutil.move(folder / "engines-of-birth", moved))
            shutil.rmtree(folder)
        return made[target]

    return get


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a folder that all users may read; those of pytest are private."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        for path in folder.rglob("*"):
            path.chmod(0o755)


@pytest.mark.parametrize("target", slow_except({"onnxruntime+openvino"}, TARGETS))
def test_engines_answer_as_their_bundle(target: str, source: Path, built: Built, photo: Image.Image) -> None:
    engines = Pipeline.load(built(target))
    assert engines.backend.name == TARGETS[target]
    assert_equal_at_both_ends(engines, Pipeline.load(source, backend=TARGETS[target]), photo)


@pytest.mark.parametrize("target", TARGETS)
def test_it_holds_no_graph_of_the_bundle(target: str, built: Built) -> None:
    beside = {path.name for path in (built(target) / BUNDLE_FOLDER).rglob("*") if path.is_file()}
    assert beside == {"bundle.json", "embedding.safetensors", "tokenizer.json", "chat_template.jinja"}


@pytest.mark.parametrize("target", slow_except(set(TARGETS) - {"openvino"}, TARGETS))
def test_another_user_runs_a_read_only_copy(target: str, built: Built, open_folder: Path, photo_file: Path) -> None:
    copied = Path(shutil.copytree(built(target), open_folder / "copied"))
    for path in (copied, *copied.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    # The first answer imports everything, because another user may have no access to Python's files.
    program = (
        "import os, sys; from sinkprune import Pipeline; from PIL import Image\n"
        "photo = Image.open(sys.argv[2]).convert('RGB')\n"
        "def ask():\n"
        "    pipeline = Pipeline.load(sys.argv[1])\n"
        "    print(*pipeline.generate(photo, 'What?', budget='retain-64', max_new_tokens=4).token_ids)\n"
        "ask()\n"
        f"if os.geteuid() == 0: os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "ask()\n"
    )
    words = [sys.executable, "-c", program, str(copied), str(photo_file)]
    first, second = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert first == second != ""


def test_every_command_accepts_it_as_a_bundle(built: Built, photo_file: Path, tmp_path: Path) -> None:
    engines, report = built("onnxruntime"), tmp_path / "report.json"
    ask = (engines, "--image", photo_file, "--prompt", "What is this?")
    assert run("sinkprune-run", *ask, "--budget", "retain-64", "--max-new-tokens", 2).code == 0
    profile = run("sinkprune-profile", *ask, "--repeat", 1, "--new-tokens", 2, "--json", report)
    assert profile.code == 0, profile.stderr
    assert json.loads(report.read_text())["backend"] == "ort-cpu"
    task = tmp_path / "task.jsonl"
    task.write_text(json.dumps({"image": str(photo_file), "question": "What?", "answer": "a"}) + "\n")
    evaluated = run("sinkprune-evaluate", engines, "--data", task, "--budgets", "retain-64")
    assert evaluated.code == 0, evaluated.stderr
    calibrated = run("sinkprune-calibrate", "norms", engines, "--data", task)
    assert calibrated.code == 0, calibrated.stderr


def test_sums_pin_the_folder(built: Built, tmp_path: Path) -> None:
    engines = built("onnxruntime")
    right = read_engines(engines).sha256
    assert Pipeline.load(engines, sha256=right).bundle.engines is not None
    with pytest.raises(EnginesError, match="It is not the expected manifest"):
        Pipeline.load(engines, sha256="a" * 64)
    with pytest.raises(UsageError, match="were not to be compared"):
        Pipeline.load(read_runnable(engines, Trust(right)), check_sums=False)


def test_parts_of_another_bundle_are_refused(built: Built, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(built("onnxruntime"), tmp_path / "copied"))
    manifest = read_engines(copied).manifest
    (copied / BUNDLE_FOLDER / "weights" / "tokenizer.json").unlink()
    manifest.files.clear()
    (copied / ENGINES.name).unlink()
    manifest.files.update(file_specs(copied))
    ENGINES.write(copied, manifest)
    with pytest.raises(EnginesError, match=r"came without 'weights/tokenizer\.json' of a bundle"):
        Pipeline.load(copied)


def test_another_backend_is_refused(built: Built) -> None:
    with pytest.raises(EnginesError, match="built for target openvino, backend 'ort-cpu' takes target onnxruntime"):
        Pipeline.load(built("openvino"), backend="ort-cpu")
