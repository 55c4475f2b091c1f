"""The graphs that turn frames into inputs of a vision tower. They have no weights, and take frames of any size."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, isqrt
from typing import Any, cast

import numpy as np

from sinkprune.contract.manifest import Dtype
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends.small_graphs import ELEMENT_TYPES, GraphWriter
from sinkprune.runtime.frames import COLUMNS_FIRST, ROWS_FIRST, FrameForm
from sinkprune.runtime.frames.resampling import LOW, PRECISION

_MOST_IN_BLOCK = 32
"""More resized pixels at a time read less often, and multiply more zeros."""


_USUAL, _LARGEST = (1920, 1080), (2208, 1242)
"""Width and height of frames. The largest are those of common stereo cameras: each takes some 100 MB on the GPU."""
_MOST_SCALE = 4
"""How far engines of Qwen's families scale frames down."""
_MOST_TAPS = 6
"""The most pixels that a filter of Pillow reads for each one, at a scale of 1."""


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
    sizes = {"F": (1, 1, 1), "H": (1, _USUAL[1], _LARGEST[1]), "W": (1, _USUAL[0], _LARGEST[0])}
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

    TensorRT computes its one product of fp64 in fp32, which differs by the last bit.
    """
    sizes = {"F": (1, 1, 1), "H": (1, _USUAL[1], _LARGEST[1]), "W": (1, _USUAL[0], _LARGEST[0])}
    return FrameForm({COLUMNS_FIRST: bilinear_graph(side, cast(Dtype, dtype.name), settings)}, side, {}, sizes)


def bilinear_graph(side: int, dtype: Dtype, settings: Mapping[str, Any]) -> GraphWriter:
    """Return the graph of squares `pixel_values` [F,3,side,side] of frames [F,H,W,3] of one size, mixed in floats."""
    graph = GraphWriter()
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
    pixels = graph.op("Cast", pixels, to=ELEMENT_TYPES[dtype])
    graph.op("Transpose", pixels, into="pixel_values", perm=[0, 3, 1, 2])
    graph.output("pixel_values", dtype, ["F", 3, side, side])
    return graph


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
    if masked:
        values = _looked_up(graph, pixels, dtype)
        graph.op("Mul", values, graph.input("inside", dtype, [side, side]), into="pixel_values")
    else:
        _looked_up(graph, pixels, dtype, into="pixel_values")
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
