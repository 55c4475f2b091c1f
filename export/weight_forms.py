"""The forms that matrices of linear layers are stored in. Adding one is a class here and its line in `form_of`.

Quantised matrices stand in front of their MatMul as DequantizeLinear: TensorRT takes that, ONNX Runtime and OpenVINO
fuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import onnx_ir as ir

from sinkprune.contract.errors import UsageError
from sinkprune.contract.precision import BLOCK_SIZES, DTYPES, Array, WeightForms, WeightsName
from sinkprune.export.precision import PRECISIONS, Precision
from sinkprune.export.rounding import Rounding, packed, to_nearest

DEFAULT_BLOCK_SIZE = max(BLOCK_SIZES)
"""Engines round states in groups no larger than a block, and larger groups are faster."""
_FLOAT_TYPES: dict[str, np.dtype[Any]] = {
    "fp32": DTYPES["fp32"],
    "fp16": DTYPES["fp16"],
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


class Matrices(Protocol):
    """The graph that a matrix is written into, as forms need it."""

    op: Any
    precision: Precision

    def read(self, name: str, shape: Sequence[int]) -> Array:
        """The checkpoint's tensor `name` of `shape`."""

    def stored(
        self, name: str, dtype: ir.DataType, shape: Sequence[int], read: Callable[[], ir.TensorProtocol]
    ) -> ir.Value:
        """A weight of its own, which `read` gives when the graph is saved."""


class WeightForm(Protocol):
    """How a linear layer's matrix is stored."""

    least_opset: int
    """The first opset in which the nodes of this form are what they are meant to be."""

    def matrix(self, graph: Matrices, name: str, inputs: int, outputs: int) -> ir.Value:
        """[inputs,outputs] in the graph's float type, of the checkpoint's tensor `name` [outputs,inputs]."""


class FloatForm:
    """Floats of the type `name`, cast to the graph's where that is another."""

    least_opset = 1

    def __init__(self, name: WeightsName) -> None:
        self._name: str = name
        self._dtype = _FLOAT_TYPES[name]

    def matrix(self, graph: Matrices, name: str, inputs: int, outputs: int) -> ir.Value:
        def read() -> ir.Tensor[Any]:
            array = graph.precision.converted(name, graph.read(name, [outputs, inputs]))
            # bf16 holds whatever the graph's type does.
            own = PRECISIONS.get(self._name)
            return ir.Tensor((own.converted(name, array) if own else array.astype(self._dtype)).T)

        onnx_type = ir.DataType.from_numpy(self._dtype)
        value = graph.stored(name, onnx_type, [inputs, outputs], read)
        return value if self._dtype == graph.precision.numpy else graph.op.Cast(value, to=graph.precision.onnx)


class Int8Form:
    """int8, one scale for each output."""

    least_opset = 19

    def __init__(self, rounding: Rounding) -> None:
        self._rounding = rounding

    def matrix(self, graph: Matrices, name: str, inputs: int, outputs: int) -> ir.Value:
        halves = _Halves(graph, name, [outputs, inputs], self._rounding, 127, inputs)
        codes = graph.stored(name, ir.DataType.INT8, [inputs, outputs], lambda: ir.Tensor(halves.codes().T))
        scales = graph.stored(
            f"{name}.scale", graph.precision.onnx, [outputs], lambda: ir.Tensor(halves.scales()[:, 0])
        )
        return _typed(graph, graph.op.DequantizeLinear(codes, scales, axis=1), codes)


class Int4Form:
    """int4, one scale for each block of at most `most_in_block` inputs."""

    # Of INT4 and of blocks
    least_opset = 21

    def __init__(self, most_in_block: int, rounding: Rounding) -> None:
        self._most_in_block, self._rounding = most_in_block, rounding

    def matrix(self, graph: Matrices, name: str, inputs: int, outputs: int) -> ir.Value:
        block = _block_of(name, inputs, self._most_in_block)
        shape = ir.Shape([inputs, outputs])
        halves = _Halves(graph, name, [outputs, inputs], self._rounding, 7, block)
        codes = graph.stored(
            name,
            ir.DataType.INT4,
            [inputs, outputs],
            lambda: ir.PackedTensor(packed(halves.codes().T), ir.DataType.INT4, shape=shape),
        )
        scales = graph.stored(
            f"{name}.scale",
            graph.precision.onnx,
            [inputs // block, outputs],
            lambda: ir.Tensor(np.ascontiguousarray(halves.scales().T)),
        )
        return _typed(graph, graph.op.DequantizeLinear(codes, scales, axis=0, block_size=block), codes)


def _typed(graph: Matrices, matrix: ir.Value, codes: ir.Value) -> ir.Value:
    """`matrix`, of the shape of its `codes`: not every opset's inference tells it, and dialects ask for shapes."""
    matrix.shape, matrix.type = codes.shape, ir.TensorType(graph.precision.onnx)
    return matrix


class _Halves:
    """A matrix that is read and rounded once, when its codes are asked for; its scales are asked for next."""

    def __init__(
        self, graph: Matrices, name: str, shape: Sequence[int], rounding: Rounding, most: int, block: int
    ) -> None:
        self._graph, self._name, self._shape = graph, name, shape
        self._rounding, self._most, self._block = rounding, most, block
        self._scales: Array | None = None

    def codes(self) -> Array:
        precision, weight = self._graph.precision, self._graph.read(self._name, self._shape)
        # Refused where the graph's type cannot hold it, rounded from what was read.
        precision.converted(self._name, weight)
        codes, self._scales = self._rounding(self._name, weight, self._most, self._block, precision.numpy)
        return codes

    def scales(self) -> Array:
        if self._scales is None:
            raise RuntimeError(f"the codes of '{self._name}' are written before its scales")
        scales, self._scales = self._scales, None
        return scales


def _block_of(name: str, inputs: int, most: int) -> int:
    """The largest block of at most `most` that divides the inputs of the matrix `name`; raises `UsageError`."""
    for block in sorted(BLOCK_SIZES, reverse=True):
        if block <= most and inputs % block == 0:
            return block
    raise UsageError(
        f"'{name}' has {inputs} inputs, expected a multiple of {min(BLOCK_SIZES)}, the smallest block of int4. "
        "Export with --weights int8, or --vision-weights int8 where it is the tower's."
    )


def form_of(name: WeightsName, block_size: int | None, rounding: Rounding = to_nearest) -> WeightForm:
    """The form of that name; `block_size` is that of forms in blocks, `rounding` the rule of forms that round."""
    if name == "int8":
        return Int8Form(rounding)
    if name == "int4":
        return Int4Form(block_size or DEFAULT_BLOCK_SIZE, rounding)
    return FloatForm(name)


def chosen_forms(
    precision: Precision, weights: WeightsName | None, vision: WeightsName | None, block_size: int | None
) -> WeightForms:
    """What was asked for, and for what was not: `weights` as `precision` has it, `vision` int8 beside quantised
    weights, else as they are.

    Raises `UsageError` for forms that do not go together.
    """
    decoder = weights or precision.name
    tower = vision or ("int8" if decoder in ("int8", "int4") else decoder)
    for option, form in (("--weights", decoder), ("--vision-weights", tower)):
        if form == "fp32" and precision.name == "fp16":
            raise UsageError(f"{option} is fp32, but states are fp16. Export with --precision fp32, or leave it out.")
    in_blocks = "int4" in (decoder, tower)
    if block_size is not None and not in_blocks:
        raise UsageError(
            f"--block-size is {block_size}, but no weights are int4. Add --weights int4, or leave it out."
        )
    if block_size is not None and block_size not in BLOCK_SIZES:
        raise UsageError(f"--block-size is {block_size}, expected one of {', '.join(map(str, BLOCK_SIZES))}.")
    return WeightForms(decoder, tower, (block_size or DEFAULT_BLOCK_SIZE) if in_blocks else None)
