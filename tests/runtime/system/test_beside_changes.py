"""A loaded pipeline does not depend on the bundle's folder any more: it holds the checked files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BundleError
from sinkprune.contract.manifest import EMBEDDING
from sinkprune.contract.precision import WeightsName
from sinkprune.runtime.backends.onnxruntime.backend import OrtBackend
from support.models.heads_of_64 import CONFIG, export_random
from support.programs.commands import succeed
from support.programs.slow_cases import each_once

Bundles = Callable[..., Path]
BUDGETS = ("retain-128", "retain-64")
QUESTION = "What is on the table?"
PREFILL = "ort-cpu+openvino-prefill"
BACKENDS = ("ort-cpu", "openvino", "ort-cpu+openvino", PREFILL)


@pytest.fixture(autouse=True)
def every_load_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load looks for files that its session reads, as it does for users."""
    monkeypatch.setattr(OrtBackend, "_reads_files", OrtBackend._reads_files.__wrapped__)


@pytest.fixture
def copied(bundle: Bundles, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle("gqa-112", "fp32", BUDGETS), tmp_path / "bundle"))


def answers(pipeline: Pipeline, photo: Image.Image) -> list[tuple[list[int], list[int]]]:
    budgets = ("none", *reversed(BUDGETS))
    found = [pipeline.generate(photo, QUESTION, budget=budget, max_new_tokens=4) for budget in budgets]
    return [(answer.token_ids, list(answer.tokens_per_layer)) for answer in found]


def cut_off_weights(root: Path) -> None:
    """Every file of weights but the embedding has no bytes any more."""
    for path in (root / "graphs" / "weights").iterdir():
        os.truncate(path, 0)


@pytest.mark.parametrize(("alter", "backend"), each_once([shutil.rmtree, cut_off_weights], BACKENDS))
def test_a_loaded_pipeline_answers_as_before(
    alter: Callable[[Path], object], backend: str, copied: Path, bundle: Bundles, photo: Image.Image
) -> None:
    expected = answers(Pipeline.load(bundle("gqa-112", "fp32", BUDGETS), backend=backend), photo)
    loaded = Pipeline.load(copied, backend=backend)
    alter(copied)
    assert answers(loaded, photo) == expected


def mapped(folder: Path) -> list[str]:
    """The lines of this process's memory map that name files of the folder."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


@pytest.mark.parametrize(
    ("backend", "weights"),
    each_once(
        ("ort-cpu", "openvino", "ort-cpu+openvino", PREFILL), ("fp32", "fp16", "bf16", "int8", "int4", "uint4")
    ),
)
def test_no_file_stays_mapped(weights: WeightsName, backend: str, bundle: Bundles, photo: Image.Image) -> None:
    """So that nothing depends on which matrices a library packs on this processor."""
    path = bundle("gqa-112", "fp32", BUDGETS, weights=weights)
    loaded = Pipeline.load(path, backend=backend, check_sums=False)
    assert not mapped(path)
    answers(loaded, photo)
    assert not mapped(path)


def test_engines_for_openvino_are_not_read_again(bundle: Bundles, photo: Image.Image, tmp_path: Path) -> None:
    engines = tmp_path / "engines"
    succeed("sinkprune-build", bundle("gqa-112", "fp32", BUDGETS), "-o", engines, "--target", "openvino")
    loaded = Pipeline.load(engines)
    expected = answers(loaded, photo)
    assert not mapped(engines)
    for path in engines.rglob("*.bin"):
        os.truncate(path, 0)
    assert answers(loaded, photo) == expected


@pytest.mark.parametrize("backend", ["ort-cpu", PREFILL])
def test_what_onnxruntime_leaves_mapped_is_loaded_from_memory(
    backend: str, copied: Path, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are no matrices stand in for a matrix that it does not pack on some processor."""
    expected = answers(Pipeline.load(copied, backend=backend), photo)
    monkeypatch.setattr(OrtBackend, "_hold_small_weights", lambda *given: [])
    loaded = Pipeline.load(copied, backend=backend)
    assert not mapped(copied)
    cut_off_weights(copied)
    assert answers(loaded, photo) == expected


def test_an_embedding_altered_in_place_is_an_error_and_no_signal(tmp_path: Path, photo: Image.Image) -> None:
    """A table of more than a megabyte is not kept in memory."""
    text = {**CONFIG["text_config"], "vocab_size": 2048}
    root = export_random(tmp_path, {**CONFIG, "text_config": text}, budgets=("retain-64",)).path
    table = root / EMBEDDING
    before = table.read_bytes()
    # Written over behind the header, and cut off
    for altered in (before[: len(before) // 8].ljust(len(before), b"\0"), before[:4096]):
        table.write_bytes(before)
        loaded = Pipeline.load(root)
        with table.open("r+b") as file:
            file.write(altered)
            file.truncate()
        with pytest.raises(BundleError, match=r"'weights/embedding\.safetensors' was altered or replaced"):
            loaded.generate(photo, QUESTION, max_new_tokens=2)


def test_a_bundle_replaced_while_it_is_loaded_is_refused(copied: Path) -> None:
    opened = read_bundle(copied)
    shutil.copytree(copied, copied.with_name("new"))
    copied.rename(copied.with_name("old"))
    copied.with_name("new").rename(copied)
    with pytest.raises(BundleError, match="was altered or replaced since it was opened"):
        Pipeline.load(opened)
