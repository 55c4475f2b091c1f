"""Everything in engines.json is compared before an engine is loaded; a refusal names both sides and the command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sinkprune import Pipeline
from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.contract.engines_manifest import ASKED_LIMITS, ENGINES, MOST_TOKENS, EngineSpec, Limits, read_engines
from sinkprune.contract.errors import EnginesError, UsageError
from sinkprune.runtime.backends import load_backend, tensorrt
from sinkprune.runtime.backends.compatibility import open_engines
from sinkprune.runtime.backends.tensorrt import TensorRTBackend
from support.programs.commands import assert_refused, run, succeed
from support.stand_ins.fake_device import FakeDevice
from support.stand_ins.fake_tensorrt import ACTIVATIONS, VERSION, FakeBuild, FakeTensorRT, build_fake_engines

PLUGIN_HASH = "a" * 64


@pytest.fixture(scope="module")
def small(bundle: Callable[..., Path]) -> Bundle:
    return read_bundle(bundle("gqa-112", "fp32", ("retain-64", "retain-64+compact")))


@pytest.fixture
def build(small: Bundle, tmp_path: Path) -> FakeBuild:
    return build_fake_engines(small, tmp_path / "engines")


def load(bundle: Bundle, build: FakeBuild, library: FakeTensorRT) -> None:
    """Load engines on fakes."""
    built = open_engines(build.folder, bundle)
    built.check_backend("tensorrt")
    Pipeline(bundle, TensorRTBackend("tensorrt", library, library.device, built), built)


def assert_refused_unloaded(bundle: Bundle, build: FakeBuild, *said: str, **device: Any) -> None:
    library = FakeTensorRT(FakeDevice(**device))
    with pytest.raises(EnginesError) as refusal:
        load(bundle, build, library)
    for words in said:
        assert words in str(refusal.value)
    assert library.engines == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"library_version": "10.3.0"}, ["10.3.0", VERSION]),
        ({"compute_capabilities": (87, 110)}, ["sm_87, sm_110", "FakeDevice, sm_86"]),
        ({"bundle_sha256": "b" * 64}, ["another bundle", "b" * 64]),
        ({"checkpoint_sha256": "c" * 64}, ["another checkpoint", "c" * 64]),
        ({"target": "tensorrt-rtx"}, ["target tensorrt-rtx", "target tensorrt"]),
        ({"plugins": {"TopRho": PLUGIN_HASH}}, ["'TopRho'", "registered here: none"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_mismatch_names_both_sides_and_the_command(
    change: dict[str, Any], said: list[str], small: Bundle, build: FakeBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide_plugins(monkeypatch, {})
    build.change(**change)
    assert_refused_unloaded(small, build, *said, f"sinkprune-build {small.path} -o ", "--target tensorrt")


def provide_plugins(monkeypatch: pytest.MonkeyPatch, plugins: dict[str, str]) -> list[Any]:
    """Make `plugins` the only ones installed; what they are registered with is appended to the list returned."""
    asked: list[Any] = []

    def register(library: Any) -> dict[str, str]:
        asked.append(library)
        return plugins

    entries = {tensorrt.PLUGINS: [SimpleNamespace(name="ours", load=lambda: register)]}
    monkeypatch.setattr(tensorrt, "entry_points", lambda group: entries.get(group, []))
    return asked


def test_plugins_are_registered_where_engines_call_them(
    small: Bundle, build: FakeBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, library = provide_plugins(monkeypatch, {"TopRho": PLUGIN_HASH}), FakeTensorRT(FakeDevice())
    load(small, build, library)
    assert asked == []
    build.change(plugins={"TopRho": PLUGIN_HASH})
    load(small, build, library)
    assert asked == [library]
    # With other kernels
    provide_plugins(monkeypatch, {"TopRho": "e" * 64})
    assert_refused_unloaded(small, build, "'TopRho'", PLUGIN_HASH, "e" * 64, "sinkprune-build")


def test_too_little_memory_names_need_and_free_before_anything_is_loaded(small: Bundle, build: FakeBuild) -> None:
    need = sum(spec.size for spec in build.manifest.files.values()) + max(ACTIVATIONS.values())
    assert_refused_unloaded(small, build, "MB free", "of weights and code", "--max-prompt", total=need - 1)


def test_tensorrt_needs_engines_and_takes_no_threads(small: Bundle, build: FakeBuild) -> None:
    with pytest.raises(UsageError, match="--target tensorrt-rtx, and add --engines"):
        load_backend("tensorrt-rtx")
    with pytest.raises(UsageError, match="threads is 2"):
        load_backend("tensorrt", 2, open_engines(build.folder, small))


def test_each_given_limit_holds_alone(small: Bundle, build: FakeBuild) -> None:
    engines = {graph: EngineSpec(spec.file, {}, {}, None, 0.1) for graph, spec in build.manifest.engines.items()}
    any_shape = {"target": "onnxruntime", "compute_capabilities": (), "engines": engines, "limits": Limits(1, 1, 1)}
    most = small.manifest.max_images
    for name, limits in (
        ("prompt_tokens", Limits(1, MOST_TOKENS, most)),
        ("new_tokens", Limits(MOST_TOKENS, 1, most)),
        ("images", Limits(MOST_TOKENS, MOST_TOKENS, 1)),
        ("prompt_tokens new_tokens images", Limits(1, 1, 1)),
    ):
        build.change(**any_shape, flags={ASKED_LIMITS: name})
        assert open_engines(build.folder, small).limits == limits


def test_a_command_refuses_other_engines_and_names_the_limits_and_the_check_that_they_had(
    small: Bundle, bundle: Callable[..., Path], photo_file: Path, tmp_path: Path
) -> None:
    build, target = ("sinkprune-build", small.path, "-o", tmp_path / "engines"), ("--target", "onnxruntime")
    words = ("--max-prompt", 128, "--max-new-tokens", 64, "--check", photo_file)
    succeed(*build, *target, *words)
    ask = ("--engines", tmp_path / "engines", "--image", photo_file, "--prompt", "What?")
    told = f"{bundle('gqa-112')} -o {tmp_path / 'engines'} --target onnxruntime"
    assert_refused(
        run("sinkprune-run", bundle("gqa-112"), *ask),
        "another bundle",
        f"{told} --max-prompt 128 --max-new-tokens 64 --check PICTURE --force",
    )
    succeed(*build, *target, "--force")
    assert_refused(run("sinkprune-run", bundle("gqa-112"), *ask), "another bundle", "--target onnxruntime --force")
    # They hold matrices as they are packed for what the processor can do.
    engines = read_engines(tmp_path / "engines")
    for change, said in (
        ({"flags": engines.manifest.flags | {"instructions": "avx2 fma"}}, "optimised for instructions avx2 fma"),
        ({"library_version": "1.0"}, "built by onnxruntime 1.0"),
    ):
        ENGINES.write(engines.path, replace(engines.manifest, **change))
        assert_refused(run("sinkprune-run", small.path, *ask), said, "--target onnxruntime --force")
    ENGINES.write(engines.path, engines.manifest)
    head = engines.path / engines.manifest.engines["head"].file
    head.write_bytes(bytes(head.stat().st_size))
    assert_refused(run("sinkprune-run", small.path, *ask), "altered")
