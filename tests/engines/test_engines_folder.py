"""A folder of engines runs by itself: moved, read-only, for another user, and in every command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_runnable
from sinkprune.contract.engines_manifest import ENGINES, read_engines
from sinkprune.contract.errors import EnginesError, UsageError
from sinkprune.contract.files.manifest_file import file_specs
from sinkprune.contract.files.trust import Trust
from sinkprune.contract.manifest import BUNDLE_FOLDER
from support.programs.commands import run
from support.programs.slow_cases import slow_except
from support.references.same_answers import assert_equal_at_both_ends

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
