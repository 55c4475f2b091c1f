"""TensorRT accepts every family's graphs, 10.3 by its list. Optimisation profiles hold every shape of a request."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import onnx
import onnx.parser
import pytest
from PIL import Image

from sinkprune import Clip
from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.contract.engines_manifest import Limits, Range, read_engines
from sinkprune.engines.profiles import optimisation_profiles, resolve_limits
from sinkprune.engines.progress import SILENT
from sinkprune.engines.targets import BuildJob
from sinkprune.engines.targets.tensorrt import TensorRTRTX
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.dialects import DIALECTS
from sinkprune.export.methods import METHODS
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.small_graphs import graphs_of
from sinkprune.runtime.frames import COLUMNS_FIRST, ROWS_FIRST
from support.models.clips import INTERNVL_BUDGETS
from support.models.heads_of_64 import (
    CONFIG,
    INTERNVL_CONFIG,
    NEXT_CONFIG,
    OFT_CONFIG,
    OPENVLA_CONFIG,
    PALIGEMMA_CONFIG,
    PI0_CONFIG,
    PI05_CONFIG,
    QWEN2_CONFIG,
    QWEN3_CONFIG,
    QWEN_CONFIG,
    export_random,
)
from support.models.manifests import file_of
from support.programs.commands import succeed
from support.programs.slow_cases import slow
from support.references.shapes_sent import shapes_outside_optimisation_profiles
from support.references.trt10_operators import fault
from support.stand_ins.fake_tensorrt import LIMITS, Rig, build_fake_engines

needs_rtx = pytest.mark.skipif(platform.machine() != "x86_64", reason="tensorrt-rtx has wheels for x86-64 only")

NEXT = ("retain-320", "retain-160+raster+visual-keys+compact")
QWEN = ("prune-66.7", "prune-88.9+raster+visual-keys")
CLIPS = ("prune-80", "prune-80+per-frame")
PIXELS = {"max_pixels": 376320}
# Norms of InternVL's largest tower
ROWS = {"norm_type": "rms_norm", "use_qk_norm": True, "use_mean_pooling": False}


class Family(NamedTuple):
    """What to export with random weights, and the ranges of shapes that its engines must have."""

    config: dict[str, Any]
    options: dict[str, Any]
    ranges: Mapping[str, Range] = MappingProxyType({})
    """By `graph profile tensor`."""


FAMILIES = {
    "llava-next": Family(
        NEXT_CONFIG,
        {"budgets": NEXT},
        {
            "vision prefill pixel_values": Range((1, 3, 336, 336), (5, 3, 336, 336), (5, 3, 336, 336)),
            "sinkpruner/retain-320/select_after_0 prefill norms": Range((1, 576), (5, 576), (5, 576)),
            # Unpruned, an image on 2x2 tiles has 48 lines of 48 tokens and a newline.
            "decoder_0 prefill hidden": Range((1, 1, 256), (1, 709, 256), (1, 576 + 48 * 49 + 512, 256)),
        },
    ),
    "internvl": Family(
        {**INTERNVL_CONFIG, "vision_config": {**INTERNVL_CONFIG["vision_config"], **ROWS}},
        {"budgets": QWEN, "max_frames": 8},
        {
            # Twelve tiles and the whole image, of up to half of 16 tokens and a sink by the larger budget
            "vision prefill pixel_values": Range((1, 3, 112, 112), (13, 3, 112, 112), (13, 3, 112, 112)),
            "sinkpruner/prune-66.7/select_after_0 prefill visual_index": Range((1,), (13 * 9,), (13 * 9,)),
        },
    ),
    "qwen2-vl": Family(QWEN2_CONFIG, {"budgets": ("prune-77.8", CLIPS[1]), "max_frames": 8, **PIXELS}),
    "qwen2.5-vl": Family(
        QWEN_CONFIG,
        {"budgets": QWEN, **PIXELS},
        {
            "vision prefill pixel_values": Range((1, 4, 1176), (1, 1920, 1176), (1, 1920, 1176)),
            "vision prefill window_index": Range((1, 64), (30, 64), (120, 64)),
        },
    ),
    "qwen2.5-vl, video": Family(
        QWEN_CONFIG,
        {"budgets": CLIPS, "max_frames": 8, **PIXELS},
        {
            "vision prefill pixel_values": Range((1, 4, 1176), (4, 1920, 1176), (4, 1920, 1176)),
            "vision prefill window_index": Range((1, 64), (4 * 30, 64), (4 * 120, 64)),
            "sinkpruner/prune-80/sanitizer prefill norms": Range((1, 1), (4, 480), (4, 480)),
            # 40 and 5 % of 1920 and the sink, or of 480 and a sink for each of four frames.
            "sinkpruner/prune-80/select_after_0 prefill visual_index": Range((1,), (865,), (865,)),
            "sinkpruner/prune-80+per-frame/select_after_0 prefill visual_index": Range((1,), (868,), (868,)),
            "decoder_0 prefill hidden": Range((1, 1, 256), (1, 932, 256), (1, 1920 + 512, 256)),
        },
    ),
    "qwen3-vl": Family(
        QWEN3_CONFIG,
        {"budgets": CLIPS[:1], "max_frames": 8, "max_pixels": 491520},
        {"decoder_0 decode deepstack": Range((1, 1, 384), (1, 1, 384), (1, 2, 384))},
    ),
    "paligemma": Family(
        PALIGEMMA_CONFIG,
        {"budgets": QWEN},
        {"decoder_0 prefill hidden": Range((1, 1, 256), (1, 128 + 64, 256), (1, 256 + 512, 256))},
    ),
    "pi0": Family(
        PI0_CONFIG,
        {"budgets": QWEN, "max_images": 3},
        {
            "vision prefill pixel_values": Range((1, 3, 224, 224), (3, 3, 224, 224), (3, 3, 224, 224)),
            # 3 cameras of 256 tokens, or of 128 by the larger budget, and 64 tokens of prompt.
            "decoder_0 prefill hidden": Range((1, 1, 256), (1, 3 * 128 + 64, 256), (1, 3 * 256 + 64, 256)),
        },
    ),
    "pi0.5": Family(
        PI05_CONFIG,
        {"budgets": QWEN, "max_images": 3},
        # The expert's rows are the actions alone.
        {"expert prefill cos": Range((1, 10, 128), (1, 10, 128), (1, 10, 128))},
    ),
    "openvla": Family(
        OPENVLA_CONFIG, {"budgets": QWEN}, {"head decode hidden": Range(*[(1, n, 256) for n in (1, 1, 2)])}
    ),
    "openvla-oft": Family(
        OFT_CONFIG,
        {"budgets": QWEN, "max_images": 2},
        {
            "vision prefill pixel_values": Range((1, 6, 224, 224), (2, 6, 224, 224), (2, 6, 224, 224)),
            # 64 tokens of prompt, and the rows of the state, of 56 numbers and of the stop token.
            "decoder_0 prefill hidden": Range((1, 1, 256), (1, 2 * 128 + 64, 256), (1, 2 * 256 + 64 + 58, 256)),
        },
    ),
}


@needs_rtx
@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tensorrt_rtx_builds_every_graph(family: str, dialect: str, tmp_path: Path) -> None:
    config, options, _ = FAMILIES[family]
    bundle = export_random(tmp_path, config, precision="fp16", dialect=dialect, **options)
    target = ("--target", "tensorrt-rtx", "--sm", "89" if family in ("qwen3-vl", "internvl") else "86,89,120")
    succeed("sinkprune-build", bundle.path, "-o", tmp_path / "engines", *target)
    built = read_engines(tmp_path / "engines").manifest.engines
    assert set(built) - {COLUMNS_FIRST, ROWS_FIRST, *graphs_of(bundle.manifest)} == set(bundle.manifest.graphs)
    assert ("projector" in built) == family.startswith(("llava", "pi0", "internvl", "openvla", "paligemma"))
    decoders = [graph for graph in built if graph.startswith("decoder_")]
    with_deepstack = [graph for graph in decoders if "deepstack" in built[graph].optimisation_profiles["prefill"]]
    assert with_deepstack == (["decoder_0"] if family == "qwen3-vl" else [])


@needs_rtx
@pytest.mark.parametrize(
    ("family", "dialect", "graphs"),
    [
        ("internvl", "opset24", ["vision", "projector"]),
        ("qwen2-vl", "opset24", ["vision"]),
        slow(("qwen2-vl", "opset20", ["vision"])),
        ("qwen3-vl", "opset24", ["vision", "decoder_0"]),
        ("pi0", "opset24", ["vision", "decoder_0", "decoder_2", "expert"]),
        slow(("pi0", "opset20", ["decoder_0", "decoder_2", "expert"])),
        ("pi0.5", "opset24", ["expert"]),
        slow(("pi0.5", "opset20", ["expert"])),
        ("openvla-oft", "opset24", ["vision", "decoder_0", "decoder_2", "action_head", "state_projector"]),
        slow(("openvla-oft", "opset20", ["vision", "decoder_0", "decoder_2", "action_head"])),
    ],
)
def test_tensorrt_rtx_builds_what_other_families_lack(
    family: str, dialect: str, graphs: list[str], tmp_path: Path
) -> None:
    config, options, _ = FAMILIES[family]
    bundle = export_random(tmp_path, config, precision="fp16", dialect=dialect, **options)
    profiles = optimisation_profiles(bundle.manifest, Limits(64, 8, 1))
    for graph in graphs:
        TensorRTRTX((89,)).build(BuildJob(Model.of_bundle(bundle, graph), profiles[graph]), tmp_path / graph, SILENT)
        assert (tmp_path / graph).stat().st_size


# Deep enough for every method.
DEEP = {**CONFIG, "text_config": {**CONFIG["text_config"], "num_hidden_layers": 8}}
OPTIONS = "retain-64+raster+visual-keys+compact"
# The other families have all operators of these.
ALIKE = {"llava-next", "qwen2.5-vl", "qwen2.5-vl, several images"}
KINDS = {
    **FAMILIES,
    "llava, several images": Family(
        CONFIG, {"budgets": ("retain-64", "retain-32+visual-keys+compact"), "max_images": 2}
    ),
    "llava, every method": Family(DEEP, {"budgets": ("retain-192", OPTIONS), "methods": tuple(METHODS)}),
    "llava, int8": Family(CONFIG, {"budgets": ("retain-64",), "weights": "int8"}),
    "llava, int4": Family(CONFIG, {"budgets": ("retain-64",), "weights": "int4"}),
    "qwen2.5-vl, several images": Family(QWEN_CONFIG, {"budgets": QWEN, "max_images": 2, **PIXELS}),
    "qwen3-vl, every method": Family(
        QWEN3_CONFIG,
        {"budgets": ("prune-66.7", "prune-66.7+raster"), "max_frames": 8, **PIXELS, "methods": tuple(METHODS)},
    ),
    "qwen3-vl, several images": Family(QWEN3_CONFIG, {"budgets": CLIPS, "max_frames": 8, "max_images": 2, **PIXELS}),
}


@pytest.mark.parametrize("precision", [slow("fp32"), "fp16"])
@pytest.mark.parametrize("kind", [slow(kind) if kind in ALIKE else kind for kind in KINDS])
def test_every_graph_is_on_the_list_of_10_3(kind: str, precision: str, tmp_path: Path) -> None:
    config, options, ranges = KINDS[kind]
    bundle = export_random(tmp_path, config, precision=precision, dialect="opset20", **options)
    for path in (bundle.path / "graphs").rglob("*.onnx"):
        onnx.checker.check_model(path, full_check=True)
        model = onnx.load(path, load_external_data=False)
        assert not fault(model), path
        used = {name for node in model.graph.node for name in node.input}
        assert {value.name for value in model.graph.input} <= used, path
    limits = resolve_limits(bundle.manifest, prompt_tokens=None, new_tokens=None, images=None)
    profiles = optimisation_profiles(bundle.manifest, limits)
    for place, expected in ranges.items():
        graph, profile, tensor = place.rsplit(" ", 2)
        assert profiles[graph][profile][tensor] == expected, place


def clip(size: tuple[int, int], count: int) -> Clip:
    return Clip([Image.new("RGB", size, (90, 60, 30))] * count, fps=2)


# The smallest pictures that can be pruned, the largest, the longest either way, and clips with a frame left over.
# Prompts of several images are the largest that the small checkpoints have positions for.
PROMPTS: dict[str, tuple[str, dict[str, Any], list[list[Any]]]] = {
    "llava, several images": (
        "gqa-112",
        {"budgets": ("retain-64", "retain-32+visual-keys+compact"), "max_images": 3},
        [[(30, 30)], [(600, 400), (20, 90)], [(112, 112)] * 3],
    ),
    "llava-next": (
        "next",
        {"budgets": ("retain-320", "retain-320+no-sanitizer")},
        [[(224, 224)], [(336, 112)], [(112, 112)], [(5, 900)]],
    ),
    "internvl, video": (
        "internvl",
        {"budgets": INTERNVL_BUDGETS, "max_frames": 8},
        # The texts of more frames would exceed the prompt's limit.
        [[(99, 99)], [(460, 230)], [(700, 700)], [(5, 900)], [clip((170, 140), 3)], [clip((30, 20), 1)]],
    ),
    "qwen2-vl": (
        "qwen2-vl",
        {"budgets": ("prune-77.8", CLIPS[1]), "max_frames": 8},
        [[(56, 28)], [(672, 560)], [(5600, 28)], [clip((170, 140), 8)]],
    ),
    "qwen2.5-vl": ("qwen", {"budgets": QWEN}, [[(56, 28)], [(672, 560)], [(5600, 28)], [(28, 5600)]]),
    "qwen2.5-vl, several images": (
        "qwen",
        {"budgets": ("prune-77.8",), "max_images": 3},
        [[(56, 28), (300, 500)], [(448, 560), (448, 560)], [(56, 28)]],
    ),
    "qwen2.5-vl, video": (
        "qwen",
        {"budgets": CLIPS, "max_frames": 8},
        [
            *([clip(size, 8)] for size in ((336, 280), (5600, 28), (28, 5600))),
            *([clip((56, 28), 2)], [clip((170, 140), 7)], [(56, 28)], [(672, 560)], [(5600, 28)]),
        ],
    ),
    "qwen3-vl, video": (
        "qwen3-vl",
        {"budgets": CLIPS, "max_frames": 8},
        [
            *([clip((170, 140), 8)], [clip((6400, 32), 2)], [clip((384, 320), 7)]),
            *([(64, 32)], [(768, 640)], [(6400, 32)]),
        ],
    ),
}


@pytest.mark.parametrize("prompts", PROMPTS)
def test_every_shape_lies_in_an_optimisation_profile(prompts: str, bundle: Callable[..., Path]) -> None:
    name, options, pictures = PROMPTS[prompts]
    assert not shapes_outside_optimisation_profiles(read_bundle(bundle(name, "fp32", **options)), pictures)


@needs_rtx
@pytest.mark.slow
def test_tensorrt_rtx_builds_for_images_larger_than_frames(tmp_path: Path) -> None:
    """Ten frames with an image's 1280 tokens would exceed the 3840 that TensorRT ranks at once."""
    budgets = ("prune-80", "prune-80+no-sanitizer")
    bundle = export_random(tmp_path, QWEN_CONFIG, budgets=budgets, precision="fp16", max_frames=20)
    profiles = optimisation_profiles(bundle.manifest, Limits(512, 512, 1))
    for graph in ("vision", "sinkpruner/prune-80/sanitizer", "sinkpruner/prune-80+no-sanitizer/select_after_0"):
        if graph != "vision":
            norms = {name: ranges["norms"].max for name, ranges in profiles[graph].items()}
            assert norms == {"clip": (10, 768), "image": (1, 1280)}
        job = BuildJob(Model.of_bundle(bundle, graph), profiles[graph])
        TensorRTRTX((89,)).build(job, tmp_path / "engine", SILENT)
    assert profiles["decoder_0"]["prefill"]["hidden"].max[1] == 7680 + 512


@pytest.fixture(scope="module")
def small_frames(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Return a bundle for images of up to 480 tokens, and clips of up to four groups of 155."""
    folder = tmp_path_factory.mktemp("small-frames")
    shutil.copytree(checkpoint("qwen"), folder / "checkpoint")
    limits = {"min_pixels": 784, "max_pixels": 120 * 784}
    (folder / "checkpoint/video_preprocessor_config.json").write_text(json.dumps(limits))
    export_bundle(ExportRequest(str(folder / "checkpoint"), budgets=CLIPS, max_frames=8), folder / "bundle")
    return read_bundle(folder / "bundle")


@pytest.mark.slow
def test_every_shape_lies_in_an_optimisation_profile_where_frames_are_smaller_than_images(
    small_frames: Bundle,
) -> None:
    clips = [clip(size, count) for size, count in (((336, 280), 8), ((336, 280), 2), ((56, 28), 7), ((5600, 28), 8))]
    assert not shapes_outside_optimisation_profiles(
        small_frames, [[picture] for picture in (*clips, (672, 560), (5600, 28))]
    )
    norms = optimisation_profiles(small_frames.manifest, LIMITS)["sinkpruner/prune-80/sanitizer"]
    assert {name: ranges["norms"].max for name, ranges in norms.items()} == {"clip": (4, 155), "image": (1, 480)}


def test_images_and_clips_run_in_their_own_optimisation_profiles(small_frames: Bundle, tmp_path: Path) -> None:
    build_fake_engines(small_frames, tmp_path)
    rig = Rig(small_frames, tmp_path)
    image = Image.new("RGB", (56, 56), (90, 60, 30))
    for picture, calls in ((image, [0, 1]), (image.resize((672, 560)), [0, 2]), (clip((336, 280), 8), [1, 2])):
        rig.pipeline.generate(picture, "What?", budget="prune-80", max_new_tokens=1)
        assert [len(context.enqueued) for context in rig.contexts("vision")] == calls


def test_what_is_off_the_list_of_10_3_is_refused(tmp_path: Path) -> None:
    sanitizer = "sinkpruner/retain-64/sanitizer"
    for dialect in DIALECTS:
        (tmp_path / dialect).mkdir()
    bundles = [
        export_random(tmp_path / dialect, budgets=("retain-64",), precision="fp16", dialect=dialect)
        for dialect in ("opset24", "opset20")
    ]
    for name, said in (("vision", "Attention"), ("head", "RMSNormalization"), (sanitizer, "opset 24")):
        assert said in fault(onnx.load(file_of(bundles[0], name), load_external_data=False))
    # Functions are checked.
    model = onnx.load(file_of(bundles[1], sanitizer), load_external_data=False)
    body = next(function for function in model.functions if function.name == "DiversitySelect")
    body.node.append(onnx.helper.make_node("Cast", ["count"], ["wide"], "Widen", to=onnx.TensorProto.DOUBLE))
    assert "DiversitySelect/Widen" in fault(model) and "DOUBLE" in fault(model)
