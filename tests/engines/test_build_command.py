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
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle, read_runnable
from sinkprune.contract.engines_manifest import ENGINES, Limits, read_engines
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
from support.programs.commands import assert_refused, run, succeed
from support.programs.slow_cases import slow_except
from support.references.same_answers import assert_equal_at_both_ends, options_of

Bundles = Callable[..., Path]
Built = Callable[..., Path]
NOBODY = 65534
TARGETS = {"onnxruntime": "ort-cpu", "onnxruntime+openvino": "ort-cpu+openvino", "openvino": "openvino"}

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
def built(bundle: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Return a function that builds engines of a small bundle, and moves them from their first folder."""

    @cache
    def get(target: str = "onnxruntime", form: str = "int8") -> Path:
        folder = tmp_path_factory.mktemp("birthplace")
        copied = shutil.copytree(source_of(bundle, form), folder / "bundle-of-birth")
        outcome = build(copied, folder / "engines-of-birth", "--target", target)
        assert outcome.code == 0, outcome.stderr
        moved = shutil.move(folder / "engines-of-birth", tmp_path_factory.mktemp("away") / target)
        shutil.rmtree(folder)
        return Path(moved)

    return get


def source_of(bundle: Bundles, form: str) -> Path:
    precision, weights = options_of(form)
    return bundle("gqa-112", precision, weights=weights)


@pytest.mark.parametrize(
    ("target", "form"),
    slow_except(
        {("onnxruntime", "fp16"), ("onnxruntime+openvino", "int8")},
        [("onnxruntime", "fp32"), ("onnxruntime", "fp16"), *product(TARGETS, ["int8"])],
    ),
)
def test_engines_answer_as_their_bundle(
    target: str, form: str, bundle: Bundles, built: Built, photo: Image.Image
) -> None:
    engines = read_engines(built(target, form))
    engines.verify()
    beside = {path.name for path in (engines.path / BUNDLE_FOLDER).rglob("*") if path.is_file()}
    assert beside == {"bundle.json", "embedding.safetensors", "tokenizer.json", "chat_template.jinja"}
    pipeline = Pipeline.load(engines.path)
    assert pipeline.backend.name == TARGETS[target]
    source = source_of(bundle, form)
    assert_equal_at_both_ends(pipeline, Pipeline.load(source, backend=TARGETS[target]), photo)
    assert Pipeline.load(source, engines=engines.path).backend.name == TARGETS[target]


def test_engines_are_for_one_backend_and_processor(
    bundle: Bundles, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EnginesError, match="built for target onnxruntime, backend 'openvino' takes target openvino"):
        Pipeline.load(built(), backend="openvino")
    engines = open_engines(built(), read_bundle(source_of(bundle, "int8")))
    with pytest.raises(EnginesError, match=r"optimised for provider CPUExecutionProvider, here it is CUDAExec"):
        load_backend("ort-cuda", None, engines)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(EnginesError, match=r"optimised for machine .*, here it is riscv64"):
        load_backend("ort-cpu", None, engines)


def test_the_manifest_names_the_source_of_engines(bundle: Bundles, built: Built) -> None:
    path, manifest = source_of(bundle, "int8"), read_engines(built()).manifest
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
    assert open_engines(built(), read_bundle(path)).limits is None


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_given_limits_hold_on_every_target(
    target: str, bundle: Bundles, photo: Image.Image, photo_file: Path, tmp_path: Path
) -> None:
    engines, ask = tmp_path / "engines", ("--image", photo_file, "--prompt", "What?")
    options = ("--target", target, "--max-prompt", 32, "--max-new-tokens", 8)
    if target == "onnxruntime":
        printed = build(bundle("gqa-112"), engines, *options).stdout
        assert "; prompts of 32 tokens, answers of 8\nnot checked. Compare the engines with" in printed
        assert "operators of the sanitizer: 8 run by onnxruntime\n" in printed
        assert f": sinkprune-check {bundle('gqa-112')} {engines} --image PICTURE --prompt" in printed
    else:
        summary = json.loads(build(bundle("gqa-112"), engines, *options, "--json").stdout)
        assert (summary["engines"], summary["checked"]) == (str(engines), False)
        assert summary["limits"] == {"prompt_tokens": 32, "new_tokens": 8, "images": 1}
        assert summary["bytes"] == sum(spec.size for spec in read_engines(engines).manifest.files.values())
    pipeline = Pipeline.load(engines)
    # Without max_new_tokens, an answer may have as many tokens as the engines allow.
    assert len(pipeline.generate(photo, "What is this?", min_new_tokens=8).token_ids) == 8
    assert len(json.loads(run("sinkprune-run", engines, *ask, "--json").stdout)["token_ids"]) <= 8
    said = r"9 new tokens are more than the 8 .* --max-prompt 32 --max-new-tokens 9 added"
    with pytest.raises(PromptError, match=said):
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
    outcome = run("sinkprune-build", bundle("gqa-112"), "-o", thesis, *target, "--force")
    assert_refused(outcome, "exists and is not a folder of engines", "left as it is")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target", "tensorflow"], "unknown target 'tensorflow'; did you mean 'tensorrt'? Known targets: onnx"),
        (["--sm", "87"], "--sm is for target tensorrt-rtx"),
        (["--target", "tensorrt", "--sm", "87"], "target tensorrt builds for the GPU of this machine"),
        (["--max-prompt", "1000"], "exceed the model's 1024 positions"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0, expected a whole number"),
        (["--max-images", "3"], "exported for up to 1 in a prompt"),
        (["--check", "a.png", "--image", "b.png"], "--check takes one picture, found 2"),
        (["--check", "missing.jpg"], "missing.jpg"),
        (["--check", "PHOTO", "--check-prompt", " "], "the prompt is empty"),
        (["--check-prompt", "What?"], "Add --check"),
        (["--fit", "pad"], "--fit is how the picture of --check becomes a square. Add --check"),
    ],
)
def test_wrong_arguments_are_refused(
    options: list[str], said: str, bundle: Bundles, photo_file: Path, tmp_path: Path
) -> None:
    given = [word.replace("PHOTO", str(photo_file)) for word in options]
    assert_refused(build(bundle("gqa-112"), tmp_path / "engines", "--target", "onnxruntime", *given), said)


def test_what_a_machine_or_a_bundle_lacks_is_refused(
    bundle: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, engines, full = bundle("gqa-112"), tmp_path / "engines", shutil.disk_usage(tmp_path)._replace(free=1000)
    copied = Path(shutil.copytree(source, tmp_path / "bundle"))
    weights = copied / "graphs" / "weights" / "head.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    assert_refused(build(copied, engines, "--target", "onnxruntime"), "head.bin' was altered")
    if importlib.util.find_spec("tensorrt") is None:
        outcome = build(bundle("gqa-112", "fp16"), engines, "--target", "tensorrt")
        assert_refused(outcome, "needs the library tensorrt", "JetPack", "pip install --editable '.[tensorrt]'")
    with monkeypatch.context() as patch:
        patch.setattr(targets, "available_bytes", lambda: 100_000_000)
        outcome = build(source, engines, "--target", "onnxruntime")
    assert_refused(outcome, "not enough memory", "needs about 0.3 GB of memory", "0.1 GB are free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    outcome = build(source, engines, "--target", "onnxruntime")
    assert_refused(outcome, "no room for the engines", f"'{tmp_path}' has 0 MB free")


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
def test_an_interrupt_within_an_engine_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    source = export_random(tmp_path, budgets=("retain-64",), precision="fp16").path
    monkeypatch.setattr(TerminalProgress, "step_complete", interrupt)
    outcome = build(source, tmp_path / "engines", "--target", "tensorrt-rtx", "--sm", "86")
    assert outcome.code == 130
    assert outcome.stderr == "interrupted; no engine was complete, so nothing was kept.\n"


@pytest.mark.parametrize("target", slow_except({"onnxruntime"}, TARGETS))
def test_another_user_runs_a_read_only_copy(target: str, built: Built, photo_file: Path) -> None:
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
    # The folders of pytest are private.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        copied = Path(shutil.copytree(built(target), Path(folder) / "copied"))
        for path in (copied, *copied.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        words = [sys.executable, "-c", program, str(copied), str(photo_file)]
        first, second = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert first == second != ""


def test_every_command_accepts_it_as_a_bundle(built: Built, photo_file: Path, tmp_path: Path) -> None:
    engines, report = built(), tmp_path / "report.json"
    ask = (engines, "--image", photo_file, "--prompt", "What is this?")
    succeed("sinkprune-run", *ask, "--budget", "retain-64", "--max-new-tokens", 2)
    succeed("sinkprune-profile", *ask, "--repeat", 1, "--new-tokens", 2, "--json", report)
    assert json.loads(report.read_text())["backend"] == "ort-cpu"
    task = tmp_path / "task.jsonl"
    task.write_text(json.dumps({"image": str(photo_file), "question": "What?", "answer": "a"}) + "\n")
    succeed("sinkprune-evaluate", engines, "--data", task, "--budgets", "retain-64")
    succeed("sinkprune-calibrate", "norms", engines, "--data", task)


def test_sums_pin_the_folder(built: Built) -> None:
    engines = built()
    right = read_engines(engines).sha256
    assert Pipeline.load(engines, sha256=right).bundle.engines is not None
    with pytest.raises(EnginesError, match="It is not the expected manifest"):
        Pipeline.load(engines, sha256="a" * 64)
    with pytest.raises(UsageError, match="were not to be compared"):
        Pipeline.load(read_runnable(engines, Trust(right)), check_sums=False)


def test_parts_of_another_bundle_are_refused(built: Built, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(built(), tmp_path / "copied"))
    manifest = read_engines(copied).manifest
    (copied / BUNDLE_FOLDER / "weights" / "tokenizer.json").unlink()
    manifest.files.clear()
    (copied / ENGINES.name).unlink()
    manifest.files.update(file_specs(copied))
    ENGINES.write(copied, manifest)
    with pytest.raises(EnginesError, match=r"came without 'weights/tokenizer\.json' of a bundle"):
        Pipeline.load(copied)
