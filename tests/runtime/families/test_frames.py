"""Graphs prepare frames as the host does, pixel for pixel, for any size, way to fit, filter and order of channels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.budgets import BARLESS_TOWER, Share
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import ImageError
from sinkprune.contract.policy_facts import LeRobotResize
from sinkprune.contract.precision import Array
from sinkprune.policies.policy import Policy
from sinkprune.runtime.backends.onnxruntime.backend import OrtBackend
from sinkprune.runtime.device.dlpack import read_pixels
from sinkprune.runtime.families import FITS, load_family
from sinkprune.runtime.families.internvl import TilesProcessor
from sinkprune.runtime.families.llava import SquareProcessor, pixel_table
from sinkprune.runtime.families.llava_next import LlavaNextProcessor
from sinkprune.runtime.families.policies import PaddedProcessor, ResizeWithPad
from sinkprune.runtime.frames import (
    COLUMNS_FIRST,
    FrameForm,
    FrameGraph,
    FrameInputs,
    bilinear_form,
    joined,
    square_form,
)
from sinkprune.runtime.media.frame import Frame
from sinkprune.serving.sessions import Session
from support.stand_ins.fake_ort_cuda import CudaRig
from support.stand_ins.fake_tensorrt import Rig, build_fake_engines

SIDE = 42
SQUARE = {"height": SIDE, "width": SIDE}
PIXELS: dict[str, Any] = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
}
CLIP = {
    **PIXELS,
    "do_resize": True,
    "size": {"shortest_edge": SIDE},
    "do_center_crop": True,
    "crop_size": SQUARE,
    "do_pad": False,
}
NEXT = {**CLIP, "image_grid_pinpoints": [[SIDE * a, SIDE * b] for a, b in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))]}
SIZES = [(64, 48), (48, 64), (131, 97), (SIDE, SIDE), (20, 11), (1, 1), (400, 7)]


class Host(OrtBackend):
    """ONNX Runtime on the processor, which prepares frames by the graph, and borrows tensors of "GPUs"."""

    prepares_frames = 4

    def borrow(self, frame: Any) -> Any:
        found = read_pixels(frame, 1)
        bytes_of = (ctypes.c_uint8 * prod(found.shape)).from_address(found.address)
        return self.tensor(np.array(bytes_of).reshape(found.shape))


@pytest.fixture(scope="module")
def backend() -> Host:
    return Host("ort-cpu", 1, "fastest")


@pytest.fixture
def by_graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Pipelines on ort-cpu prepare frames by the graph. Yields the number of frames of each run."""
    runs, run = list[int](), FrameGraph.run
    monkeypatch.setattr(OrtBackend, "prepares_frames", 4)
    monkeypatch.setattr(OrtBackend, "borrow", Host.borrow)

    def counted(graph: FrameGraph, frames: Any) -> Any:
        runs.append(len(frames))
        return run(graph, frames)

    monkeypatch.setattr(FrameGraph, "run", counted)
    yield runs


def photo_of(size: tuple[int, int], seed: int = 0) -> Array:
    """Return noise with extremes, which overshoot: [height,width,3]."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    pixels[::3] = np.where(pixels[::3] < 128, 0, 255)
    return pixels


def square(settings: dict[str, Any], *, masked: bool = False) -> Callable[[Any], FrameForm]:
    """Return the form of squares, by the type of the graph's pixels."""
    return lambda dtype: square_form(SIDE, pixel_table(settings, np.dtype(dtype)), masked=masked, views=3)


def prepared(form: FrameForm, backend: Host, processor: Any, pixels: Array) -> Array | None:
    frame = Frame.of_array(pixels)
    several = hasattr(processor, "frame_plans")
    plans = processor.frame_plans(frame.size) if several else [processor.frame_plan(frame.size)]
    inputs = FrameGraph(backend, form).planned(frame, plans)
    return None if inputs is None else backend.numpy(inputs.prepared(backend)["pixel_values"])


def processors() -> Iterator[tuple[Any, Callable[[Any], FrameForm], tuple[int, int]]]:
    """Yield processors with their forms, and the sizes of frames."""
    for fit, size in product(FITS, SIZES):
        yield SquareProcessor(CLIP).fitted(fit, SIDE), square(CLIP), size
    for resample, size in product((1, 2, 3, 4, 5), [(131, 97), (20, 30)]):
        yield SquareProcessor(own := {**CLIP, "resample": resample}), square(own), size
    for changed in (
        # What lies beyond the picture is black.
        {"size": {"shortest_edge": SIDE - 9}},
        {"do_resize": False},
        {"do_resize": False, "do_pad": True},
        {"do_center_crop": False, "size": SQUARE},
        {"do_rescale": False, "do_normalize": False},
    ):
        yield SquareProcessor(own := {**CLIP, **changed}), square(own), (57, 33)
    for size in SIZES[:-1]:
        # A policy's bars are zero.
        yield PaddedProcessor(own := {**PIXELS, "size": SQUARE, "pad_size": SQUARE}), square(own, masked=True), size
        for kind in get_args(LeRobotResize):
            own = {**PIXELS, "pad_size": SQUARE, "image_processor_type": kind}
            yield ResizeWithPad(own), partial(bilinear_form, SIDE, settings=own), size
    for size in [(64, 48), (48, 64), (300, 40), (40, 500), (SIDE, SIDE), (9, 9)]:
        yield LlavaNextProcessor(NEXT, SIDE), square(NEXT), size
        # The whole picture is last.
        yield TilesProcessor({**PIXELS, "min_patches": 1, "max_patches": 3}, SIDE), square(PIXELS), size


@pytest.mark.parametrize(("processor", "form", "size"), [*processors()])
def test_pixels_are_those_of_the_host(
    processor: Any, form: Callable[[Any], FrameForm], size: tuple[int, int], backend: Host
) -> None:
    """And so those of Pillow, or of LeRobot in floats."""
    pixels = photo_of(size)
    expected = processor(Image.fromarray(pixels))
    expected = expected if expected.ndim == 4 else expected[None]
    reversed_view = np.ascontiguousarray(pixels[..., ::-1])[..., ::-1]
    for dtype in (np.float32, np.float16):
        found = prepared(form(np.dtype(dtype)), backend, processor, reversed_view)
        np.testing.assert_array_equal(found, expected.astype(dtype), strict=True)


def test_the_host_prepares_what_has_no_exact_sums(backend: Host) -> None:
    stretched = SquareProcessor({**CLIP, "size": SQUARE, "do_center_crop": False})
    for processor, settings, size, by_graph in (
        (SquareProcessor({**CLIP, "resample": 0}), CLIP, (60, 50), False),
        (stretched, CLIP, (5_000, 2), True),
        (stretched, CLIP, (44_000, 2), False),
        (LlavaNextProcessor({**NEXT, "size": {"shortest_edge": SIDE + 1}}, SIDE), NEXT, (64, 48), False),
    ):
        assert (prepared(square(settings)("f4"), backend, processor, photo_of(size)) is not None) == by_graph


@pytest.mark.parametrize(("name", "share"), [("qwen", None), ("qwen3-vl", Share(1, 4))])
@pytest.mark.parametrize("size", [(70, 50), (50, 90), (200, 30), (13, 11)])
def test_patches_are_those_of_the_host(
    backend: Host, bundle: Callable[..., Path], name: str, share: Share | None, size: tuple[int, int]
) -> None:
    family = load_family(read_bundle(bundle(name)).manifest)
    family, pixels = family if share is None else family.smaller(share), photo_of(size)
    form, frame = family.frame_form(), Frame.of_array(pixels)
    assert form is not None
    inputs = FrameGraph(backend, form).planned(frame, family.frame_plans(size), family.tables(frame))
    expected = family.inputs(Image.fromarray(pixels))
    assert inputs is not None
    found = inputs.prepared(backend)
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(backend.numpy(found[key]), array, strict=True)


@dataclass
class OnGpu:
    """A tensor of another library that says it is on a GPU."""

    array: Array
    device: int = 2

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        assert self.device == 1 or stream
        return self.array.__dlpack__()


class ByInterface:
    """The same by Numba's interface alone."""

    def __init__(self, array: Array) -> None:
        found = array.__array_interface__
        self.kept, self.__cuda_array_interface__ = array, {**found, "version": 3}


def test_answers_are_those_of_the_host(
    bundle: Callable[..., Path], by_graph: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pixels = bundle("gqa-112", budgets=("retain-64",)), photo_of((90, 60))
    ours = Pipeline.load(path, fit="pad")
    monkeypatch.setattr(OrtBackend, "prepares_frames", 0)
    theirs = Pipeline.load(path, fit="pad")
    expected = theirs.generate(pixels, "What is this?", budget="retain-64", max_new_tokens=3)
    bgr = np.ascontiguousarray(pixels[..., ::-1])
    pictures: list[tuple[Any, str]] = [
        (Image.fromarray(pixels), "rgb"),
        (pixels, "rgb"),
        (bgr, "bgr"),
        (OnGpu(pixels), "rgb"),
        (OnGpu(bgr), "bgr"),
        (ByInterface(bgr), "bgr"),
        (OnGpu(bgr, device=1), "bgr"),
    ]
    for picture, order in pictures:
        found = ours.generate(picture, "What is this?", budget="retain-64", max_new_tokens=3, order=order)
        assert found.token_ids == expected.token_ids
        for one, other in zip(found.images, expected.images, strict=True):
            np.testing.assert_array_equal(one.norms, other.norms)
    assert by_graph == [1] * 7
    with pytest.raises(ImageError, match="found a frame on the GPU"):
        theirs.generate(OnGpu(pixels), "What is this?")  # type: ignore[arg-type]


class Refusing(OnGpu):
    """A tensor that its library does not share, as PyTorch's with a gradient."""

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        raise BufferError("it requires gradient")


def test_a_session_recognises_arrays_and_other_tensors_are_rejected(
    bundle: Callable[..., Path], by_graph: list[int]
) -> None:
    pixels = photo_of((90, 60))
    session = Session(Pipeline.load(bundle("gqa-112", budgets=("retain-64",))))
    others: list[tuple[Any, str]] = [
        (OnGpu(pixels.transpose(2, 0, 1)), "permute"),
        *((tensor(pixels[:, ::2]), "contiguous") for tensor in (OnGpu, ByInterface)),
        *((tensor(pixels / 255), "contiguous") for tensor in (OnGpu, ByInterface)),
        (OnGpu(pixels, device=4), "first CUDA GPU"),
        (Refusing(pixels), "detach"),
        (Refusing(pixels, device=1), "detach"),
    ]
    for tensor, advice in others:
        with pytest.raises(ImageError, match=advice):
            session.generate(tensor, "What is this?")
    by_graph.clear()
    options: dict[str, Any] = {"budget": "retain-64", "max_new_tokens": 2}
    gpu: Any = OnGpu(pixels)
    for picture in (pixels, np.ascontiguousarray(pixels[..., ::-1])[..., ::-1], Image.fromarray(pixels)):
        last = session.generate(picture, "What is this?", **options)
    assert (by_graph, last.reused_towers) == ([1], 1)
    # Pixels on a GPU are not compared.
    for _ in range(2):
        last = session.generate(gpu, "What is this?", **options)
    assert (by_graph, last.reused_towers) == ([1, 1, 1], 0)


def test_cameras_of_one_size_are_prepared_at_once(
    bundle: Callable[..., Path], by_graph: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundle("pi0", budgets=("prune-88.9",), max_images=2)
    monkeypatch.setattr(OrtBackend, "prepares_frames", 0)
    theirs = Policy.load(path)
    monkeypatch.setattr(OrtBackend, "prepares_frames", 4)
    ours = Policy.load(path)
    state = np.zeros(len(ours.bundle.manifest.acting.usual_state))
    one, same, other = photo_of((64, 48)), photo_of((64, 48), 1), photo_of((50, 60))
    cases: list[tuple[list[Any], list[int]]] = [
        ([one, same], [2]),
        ([one, other], [1, 1]),
        ([OnGpu(one), OnGpu(same)], [1, 1]),
    ]
    for cameras, runs in cases:
        by_graph.clear()
        arrays = [camera.array if isinstance(camera, OnGpu) else camera for camera in cameras]
        found, expected = (
            policy.act(given, "pick up the cup", state, seed=1)
            for policy, given in ((ours, cameras), (theirs, arrays))
        )
        np.testing.assert_array_equal(found.actions, expected.actions)
        assert by_graph == runs


def test_pictures_that_the_host_prepares_join_frames(backend: Host) -> None:
    form = square_form(SIDE, pixel_table(CLIP, np.dtype("f4")), masked=False)
    graph, processor = FrameGraph(backend, form), SquareProcessor(CLIP)
    first, second = photo_of((60, 50)), photo_of((40, 30))
    planned = graph.planned(Frame.of_array(first), [processor.frame_plan((60, 50))])
    assert planned is not None
    on_host = {"pixel_values": processor(Image.fromarray(second))[None]}
    found = FrameInputs(graph, (*planned.parts, on_host)).prepared(backend)["pixel_values"]
    expected = np.stack([processor(Image.fromarray(pixels)) for pixels in (first, second)])
    np.testing.assert_array_equal(backend.numpy(found), expected)


def test_each_frame_brings_its_places(backend: Host, bundle: Callable[..., Path]) -> None:
    family = load_family(read_bundle(bundle("pi0")).manifest).for_tower(BARLESS_TOWER)
    form, frames = family.frame_form(), [Frame.of_array(photo_of((60, 45), seed)) for seed in range(2)]
    assert form is not None
    graph, plans = FrameGraph(backend, form), family.frame_plans((60, 45))
    inputs = [graph.planned(frame, plans, family.tables(frame)) for frame in frames]
    together = joined([one for one in inputs if one is not None]).prepared(backend)
    alone = [one.prepared(backend) for one in inputs if one is not None]
    for key in ("pixel_values", "places"):
        np.testing.assert_array_equal(together[key], np.concatenate([one[key] for one in alone]), strict=True)


def test_engines_and_ort_cuda_prepare_frames_on_their_device(bundle: Callable[..., Path], tmp_path: Path) -> None:
    opened = read_bundle(bundle("gqa-112", budgets=("retain-64",)))
    build_fake_engines(opened, tmp_path / "engines")
    rig, cuda_rig = Rig(opened, tmp_path / "engines"), CudaRig(opened.path)
    ours, options = cuda_rig.pipeline(), {"budget": "retain-64", "max_new_tokens": 2}
    pixels, large = photo_of((90, 60)), photo_of((2300, 20))
    expected = Pipeline.load(opened).generate(pixels, "What is this?", **options)
    bgr = np.ascontiguousarray(pixels[..., ::-1])
    cases: list[tuple[Any, str]] = [(OnGpu(pixels), "rgb"), (OnGpu(bgr), "bgr"), (pixels, "rgb")]
    runs = [(rig.pipeline, pixels, "rgb"), (rig.pipeline, bgr, "bgr"), *((ours, *case) for case in cases * 3)]
    for pipeline, picture, order in runs:
        found = pipeline.generate(picture, "What is this?", order=order, **options)
        assert found.token_ids == expected.token_ids
        np.testing.assert_array_equal(found.images[0].norms, expected.images[0].norms)
    assert COLUMNS_FIRST in cuda_rig.report.graphs

    def calls() -> list[tuple[int, ...]]:
        every = (call for context in rig.contexts(COLUMNS_FIRST) for call in context.enqueued)
        return [shapes["frame"] for shapes, _ in every]

    before = calls()
    assert {*before} == {(1, 60, 90, 3)}
    # No engine takes larger frames, which the host prepares.
    assert rig.pipeline.generate(large, "What is this?", **options).token_ids
    assert calls() == before
    copied = rig.backend.stack([rig.backend.tensor(np.full((1, 2), value, np.float16)) for value in (1, 2)])
    np.testing.assert_array_equal(rig.backend.numpy(copied), np.array([[1, 1], [2, 2]], np.float16), strict=True)
