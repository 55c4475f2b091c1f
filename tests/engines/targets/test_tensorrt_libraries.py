"""The builder for full TensorRT, as far as it runs without that library.

TensorRT-RTX with another version has the place of TensorRT, and `FakeGpu` that of a GPU.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.models.heads_of_64 import export_random

if platform.machine() != "x86_64":
    pytest.skip("tensorrt-rtx has wheels for x86-64 only", allow_module_level=True)

import onnx
import tensorrt_rtx

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.errors import EnginesError
from sinkprune.engines.plugins import plugin_v3 as registry
from sinkprune.engines.targets import tensorrt as tensorrt_libraries
from sinkprune.engines.targets.tensorrt import TensorRT
from support.models.manifests import file_of

Libraries = Callable[..., TensorRT]


class FakeGpu:
    """A GPU with 7 GB free; nothing runs on it."""

    name = "Fake RTX"

    def __init__(self, compute_capability: int) -> None:
        self.compute_capability = compute_capability

    def memory(self) -> tuple[int, int]:
        return 7_000_000_000, 8_000_000_000


class FakeConfig:
    """A builder's configuration with bytes as timing caches; `b"foreign"` is of another GPU."""

    cache = b""

    def create_timing_cache(self, serialised: bytes) -> bytes:
        return serialised

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        if cache == b"foreign":
            return False
        self.cache = cache
        return True

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: self.cache + b" timed")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Libraries:
    """Return a function that makes `TensorRT` of a version, on a GPU of a compute capability."""

    def get(version: str = "10.16.2", compute_capability: int = 86) -> TensorRT:
        trt = SimpleNamespace(**{**vars(tensorrt_rtx), "__version__": version})
        monkeypatch.setattr(tensorrt_libraries, "import_tensorrt", lambda name: trt)
        monkeypatch.setattr(tensorrt_libraries, "open_device", lambda: FakeGpu(compute_capability))
        return TensorRT(tmp_path / "engines.timing-cache")

    return get


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    made: dict[tuple[str, str], Bundle] = {}

    def get(dialect: str, precision: str = "fp16") -> Bundle:
        key = (dialect, precision)
        if key not in made:
            folder = tmp_path_factory.mktemp(dialect)
            made[key] = export_random(folder, budgets=("retain-64",), dialect=dialect, precision=precision)
        return made[key]

    return get


def test_opset24_needs_10_15(library: Libraries, bundle: Callable[..., Bundle]) -> None:
    library("10.15.1").check_bundle(bundle("opset24"))
    for version in ("10.3.0", "10.14.1"):
        with pytest.raises(EnginesError) as caught:
            library(version).check_bundle(bundle("opset24"))
        message = str(caught.value)
        assert f"needs TensorRT 10.15 or later; {version} is installed here" in message
        assert "-o BUNDLE --precision fp16 --dialect opset20 --random-weights" in message


def test_fp32_attention_is_refused_and_its_lowering_is_not(library: Libraries, bundle: Callable[..., Bundle]) -> None:
    with pytest.raises(EnginesError, match=r"is fp32, and tensorrt compiles ONNX's Attention in fp16 only"):
        library().check_bundle(bundle("opset24", "fp32"))
    library("10.3.0").check_bundle(bundle("opset20", "fp32"))


def test_memory_of_a_board_is_one(library: Libraries) -> None:
    system, gpu = library(compute_capability=86).memories()
    assert (system.activations, gpu.activations) == (False, True)
    assert (gpu.name, gpu.free) == ("memory of Fake RTX", 7_000_000_000)
    for board in (87, 110):
        (shared,) = library(compute_capability=board).memories()
        assert shared.activations
        assert shared.copies == system.copies + gpu.copies


def test_the_timing_cache_is_reused_where_it_fits(library: Libraries) -> None:
    trt, cache = library(), lambda: (trt._timing_cache).read_bytes()
    config = FakeConfig()
    trt.configure(config)
    trt.keep_timings(config)
    assert cache() == b" timed"
    trt.configure(config)
    assert config.cache == b" timed"
    trt.keep_timings(config)
    assert cache() == b" timed timed"
    trt._timing_cache.write_bytes(b"foreign")
    trt.configure(config)
    assert config.cache == b""


def test_sanitizers_are_fitted_to_plugins_and_nothing_else_is(
    library: Libraries, bundle: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def register_for_build(trt: Any, sm: int) -> dict[str, str] | None:
        asked.append(sm)
        return {"TopRho": "sum"} if sm >= 80 else None

    monkeypatch.setattr(registry, "register_for_build", register_for_build)
    trt, source = library("10.3.0", 87), bundle("opset20")
    plain = onnx.load(file_of(source, "head"), load_external_data=False)
    assert trt.fit(plain) is plain
    assert (trt.plugins, asked) == ({}, [])
    sanitizer = onnx.load(file_of(source, "sinkpruner/retain-64/sanitizer"), load_external_data=False)
    fitted = trt.fit(sanitizer)
    assert sanitizer.functions
    assert not fitted.functions
    assert (trt.plugins, asked) == ({"TopRho": "sum"}, [87])
    assert library("10.3.0", 75).fit(sanitizer) is sanitizer
