"""Frames become inputs of the vision tower where the tower runs: resized, padded or cropped, and normalised.

The host computes weights for each size of frames once, as matrices of small blocks. A graph without weights of its
own does the rest, for frames of any size.

Pillow resizes one axis, then the other, and rounds to 8 bits after each. A resized value is a sum of weighted pixels,
with whole weights and a shift. Weights are split in two halves, so that all sums of either half are whole numbers
below 2**24, which fp32 adds exactly in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, isqrt
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from PIL import Image

from sinkprune.contract.manifest import Dtype
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Backend, Tensor
from sinkprune.runtime.backends.small_graphs import ELEMENT_TYPES, GraphWriter
from sinkprune.runtime.media.frame import Frame

COLUMNS_FIRST, ROWS_FIRST = "frames", "frames-rows-first"
"""The names of the graphs, and of their engines: Pillow begins with either axis."""
_REMEMBERED = 8
"""Sizes of frames whose weights are kept."""
_MOST_PIXELS = 1 << 23
"""The most pixels of a frame, 3840x2160 among them: a graph holds each several times as floats."""


class FramePlan(Protocol):
    """How frames of one size become views of the tower's size. Equal plans have equal weights."""

    def __hash__(self) -> int: ...

    def weights(self, form: FrameForm) -> tuple[str, dict[str, Array]] | None:
        """Return the name of the graph and its inputs that depend on the plan; None where only the host is exact."""


@dataclass(frozen=True)
class FrameForm:
    """A family's graphs of frames."""

    graphs: Mapping[str, GraphWriter]
    """By their names."""
    block: int
    """Resized pixels that are computed at a time."""
    constants: Mapping[str, Array]
    """Inputs that are the same for all frames."""
    sizes: Mapping[str, tuple[int, int, int]]
    """The smallest, usual and largest size of each dimension that differs, for engines of one range of shapes."""
    masked: bool = False
    """Whether pixels outside the resized picture are 0 after they are normalised."""


class PlannedFrame(NamedTuple):
    """A frame with its plan."""

    frame: Frame
    plan: FramePlan
    tables: Mapping[str, Array]
    """The tower's inputs beside pixels."""


class FrameGraph:
    """The graphs of frames of a family on a backend. Threads may share it."""

    def __init__(self, backend: Backend, form: FrameForm) -> None:
        self._backend, self._form = backend, form
        self._engine = lru_cache(lambda name: backend.load_small(name, form.graphs[name]))
        with backend.turn:
            # Pillow seldom begins with rows.
            self._engine(COLUMNS_FIRST)
        self._weights = lru_cache(_REMEMBERED)(lambda plan: plan.weights(form))
        self._tensors = lru_cache(_REMEMBERED)(self._new_tensors)

    def planned(
        self, frame: Frame, plans: Sequence[FramePlan], tables: Mapping[str, Array] = MappingProxyType({})
    ) -> FrameInputs | None:
        """Return a frame to be prepared by `plans`; None where the host must prepare it, with the same result."""
        if not plans or not all(self._takes(frame, plan) for plan in plans):
            return None
        return FrameInputs(self, tuple(PlannedFrame(frame, plan, tables) for plan in plans))

    def _takes(self, frame: Frame, plan: FramePlan) -> bool:
        width, height = frame.size
        found = self._weights(plan) if width * height <= _MOST_PIXELS else None
        if found is None:
            return False
        name, weights = found
        shapes = {"frame": (1, height, width, 3), **{key: array.shape for key, array in weights.items()}}
        ranges = self._backend.frame_ranges(name)
        sizes = [zip(ranges[key].min, shape, ranges[key].max, strict=True) for key, shape in shapes.items() if ranges]
        return all(least <= size <= most for each in sizes for least, size, most in each)

    def run(self, planned: Sequence[PlannedFrame]) -> dict[str, Tensor]:
        """Return the tower's inputs of frames of one plan, by name; called in a `turn`."""
        plan, frame = planned[0].plan, planned[0].frame
        if frame.on_host:
            arrays = [each.frame.pixels for each in planned]
            pixels = self._backend.tensor(np.stack(arrays) if len(arrays) > 1 else arrays[0][None])
        else:
            pixels = self._backend.borrow(frame.pixels)
        name, tensors = self._tensors(plan, frame.bgr)
        tables = {
            key: self._backend.tensor(np.concatenate([each.tables[key] for each in planned]))
            for key in planned[0].tables
        }
        return {**self._engine(name)({**tensors, "frame": pixels}), **tables}

    def _new_tensors(self, plan: FramePlan, bgr: bool) -> tuple[str, dict[str, Tensor]]:
        found = self._weights(plan)
        assert found is not None
        name, weights = found
        given = {**weights, **self._form.constants, "channels": np.arange(3)[:: -1 if bgr else 1]}
        if bgr:
            given |= {bias: given[bias][..., ::-1] for bias in ("columns_bias", "rows_bias") if bias in given}
        return name, {key: self._backend.tensor(np.ascontiguousarray(array)) for key, array in given.items()}


@dataclass(frozen=True)
class FrameInputs:
    """Pictures, in order, whose inputs of the tower are computed where it runs."""

    graph: FrameGraph
    parts: tuple[PlannedFrame | dict[str, Array], ...]
    """Frames, and inputs of pictures that the host prepared."""

    def prepared(self, backend: Backend) -> dict[str, Tensor]:
        """Return the inputs by name, joined along the axis of groups; called in a `turn`."""
        planned = [part for part in self.parts if isinstance(part, PlannedFrame)]
        alike = {(each.plan, each.frame.bgr) for each in planned if each.frame.on_host}
        on_host = sum(each.frame.on_host for each in planned)
        if len(alike) == 1 and on_host == len(self.parts) <= backend.prepares_frames:
            return self.graph.run(planned)
        runs = [
            self.graph.run([part])
            if isinstance(part, PlannedFrame)
            else {name: backend.tensor(array) for name, array in part.items()}
            for part in self.parts
        ]
        return runs[0] if len(runs) == 1 else {name: backend.stack([run[name] for run in runs]) for name in runs[0]}


def joined(inputs: Sequence[dict[str, Array] | FrameInputs]) -> FrameInputs:
    """Return the inputs of several pictures, some of them frames, for one call of the tower."""
    graph = next(one.graph for one in inputs if isinstance(one, FrameInputs))
    parts = [(one,) if isinstance(one, dict) else one.parts for one in inputs]
    return FrameInputs(graph, tuple(part for own in parts for part in own))


_MOST_IN_BLOCK = 32
"""More resized pixels at a time read less often, and multiply more zeros."""


_USUAL, _LARGEST = (1920, 1080), (2208, 1242)
"""Width and height of frames. The largest are those of common stereo cameras: each takes some 100 MB on the GPU."""
_MOST_SCALE = 4
"""How far engines of Qwen's families scale frames down."""
_MOST_TAPS = 6
"""The most pixels that a filter of Pillow reads for each one, at a scale of 1."""
_FRAME_SIZES = {"F": (1, 1, 1), "H": (1, _USUAL[1], _LARGEST[1]), "W": (1, _USUAL[0], _LARGEST[0])}


def square_form(side: int, table: Array, *, masked: bool, views: int = 1) -> FrameForm:
    """Return the form of families whose tower sees squares of `side` pixels; `table` is that of their pixels.

    A frame has up to `views` views along an axis.
    """
    graphs = {name: square_graph(side, table.dtype.name, name, masked=masked) for name in (COLUMNS_FIRST, ROWS_FIRST)}
    block = block_of(side)
    return FrameForm(graphs, block, {"table": table}, _sizes(block, side // block, side, views), masked)


def _sizes(block: int, count: int, side: int, views: int) -> dict[str, tuple[int, int, int]]:
    """Return the sizes of dimensions for frames up to `_LARGEST`, as sides of `count` blocks."""
    scale = max(1.0, _LARGEST[0] / side)
    window = ceil((block + _MOST_TAPS) * scale) + 2
    sizes = dict(_FRAME_SIZES)
    for axis in ("columns", "rows"):
        sizes |= {f"{axis}_views": (1, 1, views), f"{axis}_blocks": (count, count, count)}
        sizes |= {f"{axis}_window": (1, ceil(window * _USUAL[0] / _LARGEST[0]), window)}
    return sizes


def patch_form(table: Array, settings: Mapping[str, Any], most_tokens: int) -> FrameForm:
    """Return the form of Qwen's families, by `settings` of preprocessor_config.json, for images.

    `table` is that of their pixels. Engines take grids of up to twice the sides of a square of `most_tokens`.
    """
    block, most = settings["patch_size"] * settings["merge_size"], 2 * isqrt(most_tokens)
    graphs = {name: patch_graph(settings, table.dtype.name, name) for name in (COLUMNS_FIRST, ROWS_FIRST)}
    sizes = _sizes(block, 1, _LARGEST[0] // _MOST_SCALE, 1)
    sizes |= {f"{axis}_blocks": (1, isqrt(most_tokens), most) for axis in ("columns", "rows")}
    return FrameForm(graphs, block, {"table": table}, sizes)


def patch_graph(settings: Mapping[str, Any], dtype: Dtype, name: str) -> GraphWriter:
    """Return the graph of patches `pixel_values` [1,patches,values] of an image [1,H,W,3].

    Merged tokens are in raster order, and the patches of each are next to each other. The image fills every frame of
    a patch.
    """
    graph = GraphWriter()
    patch, merge, frames = (settings[f"{part}_size"] for part in ("patch", "merge", "temporal_patch"))
    pixels = _resized(graph, patch * merge, name)
    pixels = graph.op("Squeeze", pixels, graph.constant(np.array([0, 1])))
    pixels = _reshaped(graph, pixels, [0, merge, patch, -1, merge, patch, 3])
    order = [0, 3, 1, 4, 6, 2, 5] if name == COLUMNS_FIRST else [3, 0, 4, 1, 6, 5, 2]
    pixels = _reshaped(graph, graph.op("Transpose", pixels, perm=order), [-1, 3, 1, patch**2])
    values = graph.op("Concat", *[_looked_up(graph, pixels, dtype)] * frames, axis=2)
    shape = graph.constant(np.array([1, -1, 3 * frames * patch**2]))
    graph.op("Reshape", values, shape, into="pixel_values")
    graph.output("pixel_values", dtype, [1, "patches", 3 * frames * patch**2])
    return graph


def bilinear_form(side: int, dtype: np.dtype[Any], settings: Mapping[str, Any]) -> FrameForm:
    """Return the form of `BilinearPlan`, for squares of `side` pixels by `settings` of preprocessor_config.json.

    Its graph has squares `pixel_values` [F,3,side,side] of frames [F,H,W,3] of one size, mixed in floats. TensorRT
    computes its one product of fp64 in fp32, which differs by the last bit.
    """
    graph, kind = GraphWriter(), cast(Dtype, dtype.name)
    pixels = graph.op("Cast", graph.input("frame", "uint8", ["F", "H", "W", 3]), to=ELEMENT_TYPES["float32"])
    for axis, name in ((1, "rows"), (2, "columns")):
        ends = []
        for end in ("near", "far"):
            place = graph.input(f"{name}_{end}", "int64", [side])
            share = graph.input(f"{name}_{end}_share", "float32", [side])
            share = _reshaped(graph, share, [side, *[1] * (3 - axis)])
            ends.append(graph.op("Mul", graph.op("Gather", pixels, place, axis=axis), share))
        pixels = graph.op("Add", *ends)
    pixels = graph.op("Gather", pixels, graph.input("channels", "int64", [3]), axis=3)
    if settings["do_rescale"]:
        wide = graph.op("Cast", pixels, to=ELEMENT_TYPES["float64"])
        wide = graph.op("Mul", wide, graph.constant(np.array([settings["rescale_factor"]], np.float64)))
        pixels = graph.op("Cast", wide, to=ELEMENT_TYPES["float32"])
    if settings["do_normalize"]:
        mean, std = (graph.constant(np.array(settings[name], np.float32)) for name in ("image_mean", "image_std"))
        pixels = graph.op("Div", graph.op("Sub", pixels, mean), std)
    pixels = graph.op("Cast", pixels, to=ELEMENT_TYPES[kind])
    graph.op("Transpose", pixels, into="pixel_values", perm=[0, 3, 1, 2])
    graph.output("pixel_values", kind, ["F", 3, side, side])
    return FrameForm({COLUMNS_FIRST: graph}, side, {}, _FRAME_SIZES)


def block_of(side: int) -> int:
    """Return how many resized pixels are computed at a time, for squares of `side` pixels."""
    return next(size for size in range(_MOST_IN_BLOCK, 0, -1) if side % size == 0)


def square_graph(side: int, dtype: Dtype, name: str, *, masked: bool) -> GraphWriter:
    """Return the graph of squares `pixel_values` [G,3,side,side]: the views of frames [F,H,W,3] of one size.

    `table` [768] has the value of each pixel by channel, and `inside` [side,side] a factor of each, if `masked`.
    Views are in raster order.
    """
    graph = GraphWriter()
    pixels = _reshaped(graph, _resized(graph, block_of(side), name), [0, 0, side, -1, side, 3])
    order = [0, 1, 3, 5, 2, 4] if name == COLUMNS_FIRST else [0, 3, 1, 5, 4, 2]
    pixels = _reshaped(graph, graph.op("Transpose", pixels, perm=order), [-1, 3, side, side])
    values = _looked_up(graph, pixels, dtype, into="" if masked else "pixel_values")
    if masked:
        graph.op("Mul", values, graph.input("inside", dtype, [side, side]), into="pixel_values")
    graph.output("pixel_values", dtype, ["G", 3, side, side])
    return graph


def _resized(graph: GraphWriter, block: int, name: str) -> str:
    """Return whole numbers from 0 to 255, fp32, of the input `frame`.

    They are [F,views of rows,blocks,block,columns,3], or [F,views of columns,blocks,block,rows,3] if rows are resized
    first.
    """
    # TensorRT takes bytes as inputs only, and casts them.
    frame = graph.op("Cast", graph.input("frame", "uint8", ["F", "H", "W", 3]), to=ELEMENT_TYPES["float32"])
    first, second = ("rows", "columns") if name == ROWS_FIRST else ("columns", "rows")
    if first == "columns":
        frame = graph.op("Transpose", frame, perm=[0, 2, 1, 3])
    once = _along(graph, _reshaped(graph, frame, [0, 0, -1]), first, block)
    lines = _reshaped(graph, graph.op("Transpose", once, perm=[0, 4, 1, 2, 3, 5]), [0, 0, -1])
    return _along(graph, lines, second, block)


def _looked_up(graph: GraphWriter, pixels: str, dtype: Dtype, into: str = "") -> str:
    """Return the value in `table` [768] of each pixel of `pixels` [n,3,a,b], whose channels become RGB."""
    pixels = graph.op("Gather", pixels, graph.input("channels", "int64", [3]), axis=1)
    own = graph.constant(np.arange(0, 768, 256, dtype=np.float32)[:, None, None])
    place = graph.op("Cast", graph.op("Add", pixels, own), to=ELEMENT_TYPES["int32"])
    return graph.op("Gather", graph.input("table", dtype, [768]), place, into=into, axis=0)


def _along(graph: GraphWriter, lines: str, name: str, block: int) -> str:
    """Return [F,views,blocks,block,pixels,3]: resized lines of `lines` [F,old,3*pixels]."""
    sizes = [f"{name}_views", f"{name}_blocks"]
    place = graph.input(f"{name}_place", "int64", [*sizes, f"{name}_window"])
    weight = graph.input(f"{name}_weight", "float32", [*sizes, 2 * block, f"{name}_window"])
    bias = graph.input(f"{name}_bias", "float32", [*sizes, 2 * block, 1, 3])
    sums = graph.op("MatMul", weight, graph.op("Gather", lines, place, axis=1))
    sums = graph.op("Add", _reshaped(graph, sums, [0, 0, 0, 2 * block, -1, 3]), bias)
    high, low = graph.split(sums, 2, axis=3)
    shift = graph.constant(np.float32(2.0 ** (LOW - PRECISION)).reshape(1))
    whole = graph.op("Floor", graph.op("Mul", graph.op("Add", high, graph.op("Floor", low)), shift))
    return graph.op("Clip", whole, *(graph.constant(np.array(end, np.float32)) for end in (0, 255)))


def _reshaped(graph: GraphWriter, value: str, shape: list[int]) -> str:
    return graph.op("Reshape", value, graph.constant(np.array(shape, np.int64)))


PRECISION = 22
"""The bits of Pillow's weights. Coarser weights are scaled to as many."""
LOW = 8
"""The bits of the lower halves."""
_MOST_SUM = 2**24


class Axis(NamedTuple):
    """One axis of a view: bars are added, the result is resized, and a part is taken."""

    length: int
    """The pixels of the frame."""
    before: int
    """The pixels of the bar before them."""
    padded: int
    """The pixels with both bars."""
    resized: int
    first: int
    """The first resized pixel that is taken; those before 0 are zero."""
    taken: int
    """The number of pixels taken; those after the resized ones are zero."""


def _bicubic(x: Array) -> Array:
    x, a = np.abs(x), -0.5
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _bilinear(x: Array) -> Array:
    return np.maximum(1 - np.abs(x), 0)


def _box(x: Array) -> Array:
    return ((x > -0.5) & (x <= 0.5)).astype(np.float64)


def _hamming(x: Array) -> Array:
    x = np.abs(x)
    return np.where(x < 1, np.sinc(x) * (0.54 + 0.46 * np.cos(np.pi * x)), 0)


def _lanczos(x: Array) -> Array:
    return np.where((x >= -3) & (x < 3), np.sinc(x) * np.sinc(x / 3), 0)


_Filter = Callable[[Array], Array]
_FILTERS: dict[int, tuple[_Filter, float]] = {
    Image.Resampling.BOX: (_box, 0.5),
    Image.Resampling.BILINEAR: (_bilinear, 1.0),
    Image.Resampling.HAMMING: (_hamming, 1.0),
    Image.Resampling.BICUBIC: (_bicubic, 2.0),
    Image.Resampling.LANCZOS: (_lanczos, 3.0),
}
"""Pillow's filters with their radius, but for the nearest neighbour, which weighs nothing."""


Weights = tuple[Array, Array]
"""Whole weights of resized pixels: [resized] the first old pixel with a weight, and [resized,taps] int64."""


def pillow_weights(length: int, resized: int, resample: int) -> Weights | None:
    """Return the weights of `Image.resize` (Pillow, Resample.c), scaled by 2**`PRECISION`; None where none are."""
    if resample not in _FILTERS:
        return None
    kernel, radius = _FILTERS[resample]
    scale = length / resized
    stretch = max(scale, 1.0)
    centers = (np.arange(resized) + 0.5) * scale
    starts = np.maximum((centers - radius * stretch + 0.5).astype(np.int64), 0)
    ends = np.minimum((centers + radius * stretch + 0.5).astype(np.int64), length)
    places = starts[:, None] + np.arange(int((ends - starts).max()))
    shares = np.where(places < ends[:, None], kernel((places - centers[:, None] + 0.5) * (1 / stretch)), 0)
    # One after the other, as Pillow adds them.
    shares /= shares.cumsum(axis=1)[:, -1:]
    return starts, np.trunc(shares * 2**PRECISION + np.copysign(0.5, shares)).astype(np.int64)


_SAMPLES = 32


def rows_first(size: tuple[int, int], resized: tuple[int, int], resample: int) -> bool | None:
    """Return whether the installed Pillow resizes rows before columns; None if neither order gives its pixels.

    Pillow 13 chooses by the sizes, and earlier versions always begin with columns. So noise is resized, and some of
    its pixels are compared.
    """
    draw = np.random.default_rng(0)
    noise = np.resize(draw.integers(0, 256, 65_521, np.uint8), (size[1], size[0], 3))
    expected = np.asarray(Image.fromarray(noise).resize(resized, Image.Resampling(resample)))
    weights = [pillow_weights(*lengths, resample) for lengths in zip(size, resized, strict=True)]
    across, down = (draw.choice(count, min(count, _SAMPLES), replace=False) for count in resized)

    def along(pixels: Array, axis: int, chosen: Array) -> Array:
        found = weights[1 - axis]
        return pixels if found is None else _resized_lines(pixels, axis, found, chosen)

    sampled = expected[down][:, across]
    if np.array_equal(along(along(noise, 1, across), 0, down), sampled):
        return False
    return True if np.array_equal(along(along(noise, 0, down), 1, across), sampled) else None


def _resized_lines(pixels: Array, axis: int, weights: Weights, chosen: Array) -> Array:
    """Return the `chosen` resized pixels along an axis."""
    lines = np.moveaxis(pixels, axis, 0)
    sums = []
    for start, values in zip(*(part[chosen] for part in weights), strict=True):
        read = lines[start : start + len(values)]
        sums.append(np.tensordot(values[: len(read)], read.astype(np.int64), 1))
    whole = np.stack(sums, axis) + (1 << PRECISION - 1) >> PRECISION
    return whole.clip(0, 255).astype(np.uint8)


class Blocks(NamedTuple):
    """The weights of all views along an axis, `block` resized pixels at a time, as the graphs take them."""

    place: Array
    """[views,blocks,window] int64: the pixels that a block reads."""
    weight: Array
    """[views,blocks,2*block,window] fp32: upper halves, then lower halves by 2**`LOW`."""
    bias: Array
    """[views,blocks,2*block,1,3] fp32: what bars add, and the half that rounds."""


def blocks(views: Sequence[Axis], resample: int, block: int, bar: Sequence[int]) -> Blocks | None:
    """Return the blocks of `views`, of one size, by a filter of Pillow; their bars have the colour `bar`.

    None for the nearest neighbour, and if there are so many weights that a sum would not be exact.
    """
    parts = []
    for view in views:
        weights = pillow_weights(view.padded, view.resized, resample)
        if weights is None:
            return None
        parts.append(_taken(view, weights))
    starts, values = (np.stack(part).reshape(len(views), -1, block, *part[0].shape[1:]) for part in _aligned(parts))
    taps = values.shape[-1]
    used = values.any(axis=-1)
    first = np.where(used, starts, np.iinfo(np.int64).max).min(axis=2)
    last = np.where(used, starts + taps, 0).max(axis=2)
    first = np.where(last > 0, first, 0)
    window = max(1, int((last - first).max()))
    # Places in the padded picture, then in the frame.
    spread = np.zeros((*values.shape[:3], window + taps), np.int64)
    offsets = np.where(used, starts - first[..., None], 0)
    np.put_along_axis(spread, offsets[..., None] + np.arange(taps), values, axis=-1)
    spread = spread[..., :window]
    before = np.array([view.before for view in views])[:, None, None]
    index = first[..., None] + np.arange(window) - before
    length = views[0].length
    outside = (index < 0) | (index >= length)
    high, low = np.divmod(spread + (1 << LOW - 1), 1 << LOW)
    low -= 1 << LOW - 1
    halves = np.concatenate([high, low], axis=2)
    if 255 * np.abs(halves).sum(axis=-1).max() + (1 << PRECISION - LOW - 1) >= _MOST_SUM:
        return None
    bias = np.einsum("vbow,c->vboc", np.where(outside[:, :, None], halves, 0), np.array(bar, np.int64))
    bias[:, :, :block] += 1 << PRECISION - LOW - 1
    scale = np.repeat(np.array([1, 2**-LOW], np.float32), block)
    weight = np.where(outside[:, :, None], 0, halves) * scale[:, None]
    return Blocks(
        index.clip(0, length - 1), weight.astype(np.float32), (bias * scale[:, None]).astype(np.float32)[..., None, :]
    )


def _taken(view: Axis, weights: Weights) -> Weights:
    """Return the starts and the values of the pixels that a view takes; zeros beside the resized ones."""
    places = np.arange(view.first, view.first + view.taken)
    inside = (places >= 0) & (places < view.resized)
    places = places.clip(0, view.resized - 1)
    starts, values = weights
    return starts[places], np.where(inside[:, None], values[places], 0)


def _aligned(parts: Sequence[Weights]) -> tuple[list[Array], list[Array]]:
    """Return all starts, and all values with as many taps."""
    most = max(values.shape[1] for _, values in parts)
    wide = [np.pad(values, ((0, 0), (0, most - values.shape[1]))) for _, values in parts]
    return [starts for starts, _ in parts], wide


class PillowPlan(NamedTuple):
    """A picture with bars is resized as by Pillow, and squares are taken of it.

    Each view of rows with each view of columns is one square, in raster order.
    """

    columns: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    resample: int
    """One of Pillow's filters."""
    bar: tuple[int, ...] = (0, 0, 0)
    """The colour of bars before the picture is resized."""

    def weights(self, form: FrameForm) -> tuple[str, dict[str, Array]] | None:
        """Return the name of the graph and its inputs that depend on the plan; None where only the host is exact."""
        (columns, *_), (rows, *_) = self.columns, self.rows
        order = rows_first((columns.padded, rows.padded), (columns.resized, rows.resized), self.resample)
        inputs = dict[str, Array]()
        for name, axes in (("columns", self.columns), ("rows", self.rows)):
            found = blocks(axes, self.resample, form.block, self.bar)
            if found is None or order is None:
                return None
            inputs |= {f"{name}_{part}": array for part, array in found._asdict().items()}
        if form.masked:
            down, across = (_inside(axis) for axis in (rows, columns))
            inputs["inside"] = (down[:, None] & across).astype(form.constants["table"].dtype)
        return ROWS_FIRST if order else COLUMNS_FIRST, inputs


def _inside(axis: Axis) -> Array:
    places = axis.first + np.arange(axis.taken)
    return (places >= 0) & (places < axis.resized)


Neighbours = Callable[[int, int], tuple[Array, Array, Array]]
"""Returns the near and the far old pixel of each new one and the far one's share, for an old and a new length."""


class BilinearPlan(NamedTuple):
    """A picture is resized between two pixels each, in floats and rows first, within a black square."""

    columns: Axis
    rows: Axis
    neighbours: Neighbours

    def weights(self, form: FrameForm) -> tuple[str, dict[str, Array]]:
        """Return the name of the graph and its inputs that depend on the plan."""
        inputs = dict[str, Array]()
        for name, axis in (("columns", self.columns), ("rows", self.rows)):
            near, far, share = self.neighbours(axis.length, axis.resized)
            ends = (near, far, np.float32(1) - share, share)
            place = slice(-axis.first, axis.resized - axis.first)
            for part, values in zip(("near", "far", "near_share", "far_share"), ends, strict=True):
                inputs[f"{name}_{part}"] = whole = np.zeros(axis.taken, values.dtype)
                whole[place] = values
        return COLUMNS_FIRST, inputs
