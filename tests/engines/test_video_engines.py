"""Images larger than the frames of a clip have an optimisation profile of their own."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from sinkprune import Clip
from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.contract.engines_manifest import Range
from sinkprune.engines.profiles import optimisation_profiles, resolve_limits
from sinkprune.engines.progress import SILENT
from sinkprune.engines.targets import BuildJob
from sinkprune.engines.targets.tensorrt import TensorRTRTX
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.backends.models import Model
from support.models.heads_of_64 import QWEN_CONFIG, export_random
from support.references.shapes_sent import shapes_outside_optimisation_profiles
from support.stand_ins.fake_tensorrt import LIMITS, Rig, build_fake_engines

BUDGETS = ("prune-80", "prune-80+per-frame")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tensorrt-rtx has wheels for x86-64 only")
@pytest.mark.slow
def test_tensorrt_rtx_builds_for_images_larger_than_frames(tmp_path: Path) -> None:
    """Ten frames with an image's 1280 tokens would exceed the 3840 that TensorRT ranks at once."""
    budgets = ("prune-80", "prune-80+no-sanitizer")
    bundle = export_random(tmp_path, QWEN_CONFIG, budgets=budgets, precision="fp16", max_frames=20)
    limits = resolve_limits(bundle.manifest, prompt_tokens=None, new_tokens=None, images=None)
    profiles = optimisation_profiles(bundle.manifest, limits)
    graphs = ("sinkpruner/prune-80/sanitizer", "sinkpruner/prune-80+no-sanitizer/select_after_0")
    for graph in graphs:
        norms = {name: ranges["norms"] for name, ranges in profiles[graph].items()}
        assert norms == {"clip": Range((1, 1), (10, 768), (10, 768)), "image": Range((1, 1), (1, 1280), (1, 1280))}
    rows = {name: ranges["visual_index"].max for name, ranges in profiles[graph].items()}
    assert rows == {"clip": (7680,), "image": (1280,)}
    assert list(profiles["vision"]) == ["clip", "image"]
    assert list(profiles["decoder_0"]) == ["prefill", "decode"]
    assert profiles["decoder_0"]["prefill"]["hidden"].max[1] == 7680 + 512
    for graph in ("vision", *graphs):
        job = BuildJob(Model.of_bundle(bundle, graph), profiles[graph])
        TensorRTRTX((89,)).build(job, tmp_path / "engine", SILENT)


@pytest.fixture(scope="module")
def small_frames(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Return a bundle for images of up to 480 tokens, and clips of up to four groups of 155."""
    folder = tmp_path_factory.mktemp("small-frames")
    shutil.copytree(checkpoint("qwen"), folder / "checkpoint")
    limits = {"min_pixels": 784, "max_pixels": 120 * 784}
    (folder / "checkpoint/video_preprocessor_config.json").write_text(json.dumps(limits))
    export_bundle(ExportRequest(str(folder / "checkpoint"), budgets=BUDGETS, max_frames=8), folder / "bundle")
    return read_bundle(folder / "bundle")


@pytest.mark.slow
def test_every_shape_lies_in_an_optimisation_profile_where_frames_are_smaller_than_images(
    small_frames: Bundle,
) -> None:
    clips = [
        Clip([Image.new("RGB", size, (90, 60, 30))] * count, fps=2)
        for size, count in (((336, 280), 8), ((336, 280), 2), ((56, 28), 7), ((5600, 28), 8))
    ]
    assert not shapes_outside_optimisation_profiles(
        small_frames, [[picture] for picture in (*clips, (672, 560), (5600, 28))]
    )
    norms = optimisation_profiles(small_frames.manifest, LIMITS)["sinkpruner/prune-80/sanitizer"]
    assert {name: ranges["norms"].max for name, ranges in norms.items()} == {"clip": (4, 155), "image": (1, 480)}


def test_images_and_clips_run_in_their_own_optimisation_profiles(small_frames: Bundle, tmp_path: Path) -> None:
    build_fake_engines(small_frames, tmp_path)
    rig = Rig(small_frames, tmp_path)
    image = Image.new("RGB", (56, 56), (90, 60, 30))
    clip = Clip([image.resize((336, 280))] * 8, fps=2)
    for picture, calls in ((image, [0, 1]), (image.resize((672, 560)), [0, 2]), (clip, [1, 2])):
        rig.pipeline.generate(picture, "What?", budget="prune-80", max_new_tokens=1)
        assert [len(context.enqueued) for context in rig.contexts("vision")] == calls
