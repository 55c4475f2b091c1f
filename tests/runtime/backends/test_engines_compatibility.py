"""Everything in engines.json is compared before an engine is loaded; a refusal names both sides and the command."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.contract.engines_manifest import ASKED_LIMITS, ENGINES, MOST_TOKENS, EngineSpec, Limits
from sinkprune.contract.errors import BackendError, EnginesError, SinkpruneError, UsageError
from sinkprune.contract.files.manifest_file import file_specs
from sinkprune.runtime.backends import load_backend, tensorrt
from sinkprune.runtime.backends.compatibility import open_engines
from sinkprune.runtime.backends.tensorrt import TensorRTBackend
from sinkprune.runtime.processor import instructions
from support.models.manifests import file_of
from support.programs.commands import assert_refused, run
from support.stand_ins.fake_device import FakeDevice
from support.stand_ins.fake_tensorrt import ACTIVATIONS, VERSION, FakeBuild, FakeTensorRT, build_fake_engines

PLUGIN_HASH = "a" * 64


@pytest.fixture(scope="module")
def small(bundle: Callable[..., Path]) -> Bundle:
    return read_bundle(bundle("gqa-112", "fp32", ("retain-64", "retain-64+compact")))


@pytest.fixture
def build(small: Bundle, tmp_path: Path) -> FakeBuild:
    return build_fake_engines(small, tmp_path / "engines")


class Loading:
    """One attempt to load engines on fakes, up to the first engine."""

    def __init__(self, bundle: Bundle, build: FakeBuild, **device: Any) -> None:
        self._bundle, self._build = bundle, build
        self.device = FakeDevice(**device)
        self.library = FakeTensorRT(self.device)

    def __call__(self) -> Pipeline:
        built = open_engines(self._build.folder, self._bundle)
        built.check_backend("tensorrt")
        backend = TensorRTBackend("tensorrt", self.library, self.device, built)
        built.engines.verify()
        return Pipeline(self._bundle, backend, built)

    def refused(self, *said: str, error: type[SinkpruneError] = EnginesError) -> None:
        with pytest.raises(error) as refusal:
            self()
        for words in said:
            assert words in str(refusal.value)
        assert self.library.engines == {}


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
    Loading(small, build).refused(*said, f"sinkprune-build {small.path} -o ", "--target tensorrt")


def provide_plugins(monkeypatch: pytest.MonkeyPatch, plugins: dict[str, str]) -> list[Any]:
    """Make `plugins` the only ones installed; what they are registered with is appended to the list returned."""
    asked: list[Any] = []

    def register(library: Any) -> dict[str, str]:
        asked.append(library)
        return plugins

    class Entry(EntryPoint):
        def load(self) -> Any:
            return register

    entries = [Entry("ours", "nowhere", tensorrt.PLUGINS)]
    monkeypatch.setattr(tensorrt, "entry_points", lambda group: entries if group == tensorrt.PLUGINS else [])
    return asked


def test_plugins_are_registered_where_engines_call_them(
    small: Bundle, build: FakeBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = provide_plugins(monkeypatch, {"TopRho": PLUGIN_HASH, "DiversitySelect": "d" * 64})
    Loading(small, build)()
    assert asked == []
    build.change(plugins={"TopRho": PLUGIN_HASH})
    loading = Loading(small, build)
    loading()
    assert asked == [loading.library]
    # With other kernels
    provide_plugins(monkeypatch, {"TopRho": "e" * 64})
    Loading(small, build).refused("'TopRho'", PLUGIN_HASH, "e" * 64, "sinkprune-build")


@pytest.mark.parametrize(("cut_off", "said"), [(10, "bytes"), (0, "altered")], ids=["truncated", "altered"])
def test_a_damaged_engine_is_refused(cut_off: int, said: str, small: Bundle, build: FakeBuild) -> None:
    engine = build.folder / build.manifest.engines["decoder_1"].file
    engine.write_bytes(bytes(engine.stat().st_size - cut_off))
    Loading(small, build).refused("decoder_1.engine", said)


def test_too_little_memory_names_need_and_free_before_anything_is_loaded(small: Bundle, build: FakeBuild) -> None:
    need = sum(spec.size for spec in build.manifest.files.values()) + max(ACTIVATIONS.values())
    Loading(small, build, total=need - 1).refused("MB free", "of weights and code", "--max-prompt")


def test_tensorrt_needs_engines_and_takes_no_threads(small: Bundle, build: FakeBuild) -> None:
    with pytest.raises(UsageError, match="--target tensorrt-rtx, and add --engines"):
        load_backend("tensorrt-rtx")
    with pytest.raises(UsageError, match="threads is 2"):
        load_backend("tensorrt", 2, open_engines(build.folder, small))


@pytest.fixture
def optimised(small: Bundle, tmp_path: Path) -> FakeBuild:
    """Engines for onnxruntime: the bundle's own models, as good as optimised ones for what is tested here."""
    folder = shutil.copytree(small.path, tmp_path / "engines")
    engines = {graph: EngineSpec(spec.file, {}, {}, None, 0.1) for graph, spec in small.manifest.graphs.items()}
    made = build_fake_engines(small, tmp_path / "fake").manifest
    manifest = replace(
        made,
        target="onnxruntime",
        library_version=onnxruntime.__version__,
        compute_capabilities=(),
        engines=engines,
        flags={"provider": "CPUExecutionProvider", "machine": platform.machine(), "instructions": instructions()},
        files=file_specs(folder),
        limits=Limits(1, 1, 1),
    )
    ENGINES.write(folder, manifest)
    return FakeBuild(folder, manifest)


def test_onnxruntime_loads_its_engines_without_limits(
    small: Bundle, optimised: FakeBuild, photo: Image.Image, tmp_path: Path
) -> None:
    without_graphs = read_bundle(shutil.copytree(small.path, tmp_path / "bundle"))
    for graph in without_graphs.manifest.graphs:
        file = file_of(without_graphs, graph)
        file.write_bytes(bytes(file.stat().st_size))
    options = {"budget": "retain-64", "max_new_tokens": 3}
    plain = Pipeline.load(small).generate(photo, "What is this?", **options)
    built = Pipeline.load(without_graphs, engines=optimised.folder, check_sums=False)
    assert built.limits is None
    assert built.generate(photo, "What is this?", **options).token_ids == plain.token_ids


def test_each_given_limit_holds_alone(small: Bundle, optimised: FakeBuild) -> None:
    most = small.manifest.max_images
    for name, limits in (
        ("prompt_tokens", Limits(1, MOST_TOKENS, most)),
        ("new_tokens", Limits(MOST_TOKENS, 1, most)),
        ("images", Limits(MOST_TOKENS, MOST_TOKENS, 1)),
        ("prompt_tokens new_tokens images", Limits(1, 1, 1)),
    ):
        optimised.change(flags={**optimised.manifest.flags, ASKED_LIMITS: name})
        assert open_engines(optimised.folder, small).limits == limits


def test_onnxruntime_s_models_for_another_version_or_processor_are_refused(
    small: Bundle, optimised: FakeBuild
) -> None:
    # They hold matrices as they are packed for what the processor can do.
    flags = {**optimised.manifest.flags, "instructions": "avx2 fma"}
    for change, said in (
        ({"flags": flags}, "optimised for instructions avx2 fma, here it is .*The bundle itself runs on every one"),
        ({"library_version": "1.0"}, r"built by onnxruntime 1\.0.*--target onnxruntime --force"),
    ):
        optimised.change(**change)
        with pytest.raises(EnginesError, match=said):
            Pipeline.load(small.path, engines=optimised.folder)


def test_sums_of_engines_are_checked_unless_left_out(small: Bundle, optimised: FakeBuild) -> None:
    head = optimised.folder / optimised.manifest.engines["head"].file
    head.write_bytes(bytes(head.stat().st_size))
    with pytest.raises(EnginesError, match="altered"):
        Pipeline.load(small.path, engines=optimised.folder)
    with pytest.raises(BackendError, match="is no ONNX model"):
        Pipeline.load(small.path, engines=optimised.folder, check_sums=False)


def test_the_command_has_the_limits_and_the_check_of_the_engines(
    small: Bundle, bundle: Callable[..., Path], photo_file: Path, tmp_path: Path
) -> None:
    build, target = ("sinkprune-build", small.path, "-o", tmp_path / "engines"), ("--target", "onnxruntime")
    words = ("--max-prompt", 128, "--max-new-tokens", 64, "--check", photo_file)
    assert run(*build, *target, *words).code == 0
    ask = ("--engines", tmp_path / "engines", "--image", photo_file, "--prompt", "What?")
    told = f"{bundle('gqa-112')} -o {tmp_path / 'engines'} --target onnxruntime"
    assert_refused(
        run("sinkprune-run", bundle("gqa-112"), *ask),
        "another bundle",
        f"{told} --max-prompt 128 --max-new-tokens 64 --check PICTURE --force",
    )
    assert run(*build, *target, "--force").code == 0
    assert_refused(run("sinkprune-run", bundle("gqa-112"), *ask), "another bundle", "--target onnxruntime --force")
