"""The float types of bundles, and the forms that matrices of linear layers are stored in.

A new form is a class, in this package, and a line in `form_of`. A DequantizeLinear in front of the MatMul turns codes
into floats. TensorRT takes it, ONNX Runtime and OpenVINO fuse it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np
import onnx_ir as ir

from sinkprune.contract.errors import CheckpointError, UsageError
from sinkprune.contract.precision import BLOCK_SIZES, DTYPES, Array, PrecisionName, WeightForms, WeightsName

if TYPE_CHECKING:
    from sinkprune.export.graph import WeightedGraph
    from sinkprune.export.weights.quantised_weights import Quantisation
    from sinkprune.export.weights.rounding import RoundedMatrix, RoundingMethod

# This many values fit into a core's cache.
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Precision:
    """The type of hidden states, of caches, and of weights without a form of their own."""

    name: PrecisionName
    onnx: ir.DataType
    numpy: np.dtype[Any]

    def converted(self, name: str, array: Array) -> Array:
        """Return the checkpoint's tensor `name` in this type; raises `CheckpointError` if a value is not finite."""
        with np.errstate(over="ignore"):
            converted: Array = array.astype(self.numpy, copy=False)
        if _all_finite(converted):
            return converted
        if not np.isfinite(array).all():
            raise CheckpointError(
                f"tensor '{name}' holds NaN or infinity, expected finite numbers. The weights are damaged: download "
                "them again."
            )
        found, most = np.abs(array.astype(np.float64)).max(), np.finfo(self.numpy).max
        remedy = "Export with --precision fp32." if self.name == "fp16" else "No precision can hold it."
        raise CheckpointError(
            f"tensor '{name}' holds values up to {found:.3g}, expected at most {most:.6g}, as {self.name} can hold. "
            f"{remedy}"
        )


PRECISIONS: dict[str, Precision] = {
    name: Precision(name, ir.DataType.from_numpy(dtype), dtype) for name, dtype in DTYPES.items()
}


def _all_finite(array: Array) -> bool:
    """Return whether all values of an fp16 or fp32 `array` are finite. numpy's own test takes nine times as long."""
    bits = np.dtype(np.uint16 if array.dtype == np.float16 else np.uint32)
    infinity = np.array(np.inf, array.dtype).view(bits)
    # In memory order, so that nothing is copied.
    values = array.ravel(order="K").view(bits)
    magnitude = ~np.array(-0.0, array.dtype).view(bits)
    chunks = (values[start : start + _CHUNK] for start in range(0, values.size, _CHUNK))
    return all(np.bitwise_and(chunk, magnitude).max() < infinity for chunk in chunks)


DEFAULT_BLOCK_SIZE = max(BLOCK_SIZES)
"""Engines round states in groups of at most a block, and larger groups are faster."""
_FLOAT_TYPES: dict[str, np.dtype[Any]] = {
    "fp32": DTYPES["fp32"],
    "fp16": DTYPES["fp16"],
    "bf16": np.dtype(ml_dtypes.bfloat16),
}

OnRounded = Callable[[str, Array, "RoundedMatrix"], None]
"""Receives each rounded matrix: the tensor's name, its values [outputs,inputs], and the rounded matrix."""


@dataclass(frozen=True)
class Matrix:
    """The matrix [outputs,inputs] of a linear layer, or of several layers on the same inputs, one below the other."""

    name: str
    """The name of the weight in the graph."""
    parts: Mapping[str, int]
    """The checkpoint's tensors, and the number of outputs of each."""
    inputs: int

    @property
    def outputs(self) -> int:
        """The outputs of all parts."""
        return sum(self.parts.values())

    def read(self, graph: WeightedGraph) -> Iterator[tuple[str, Array]]:
        """Yield the name and the values [outputs,inputs] of each part."""
        for name, outputs in self.parts.items():
            yield name, graph.read(name, [outputs, self.inputs])


class WeightForm(Protocol):
    """How the matrix of a linear layer is stored."""

    least_opset: int
    """The first opset that has the nodes of this form."""

    @abstractmethod
    def matrix(self, graph: WeightedGraph, matrix: Matrix) -> ir.Value:
        """Return [inputs,outputs] in the graph's float type, its inputs in `input_order`."""

    def input_order(self, matrix: Matrix) -> Array | None:
        """Return [inputs] int64: the layer's inputs in the order of the stored rows; None if the orders are equal."""
        return None

    def joins(self, matrix: Matrix) -> bool:
        """Return whether one stored matrix can hold the parts of `matrix`, with the values that each has alone."""
        return True


class FloatForm(WeightForm):
    """Floats of the type `name`, cast to the graph's type if that differs."""

    least_opset = 1

    def __init__(self, name: WeightsName) -> None:
        self._name: str = name
        self._dtype = _FLOAT_TYPES[name]

    def matrix(self, graph: WeightedGraph, matrix: Matrix) -> ir.Value:
        def part(name: str, values: Array) -> Array:
            array = graph.precision.converted(name, values)
            # bf16 has the range of fp32.
            own = PRECISIONS.get(self._name)
            return own.converted(name, array) if own else array.astype(self._dtype)

        def read() -> ir.Tensor[Any]:
            return ir.Tensor(concatenated([part(name, values) for name, values in matrix.read(graph)]).T)

        onnx_type = ir.DataType.from_numpy(self._dtype)
        value = graph.stored(matrix.name, onnx_type, [matrix.inputs, matrix.outputs], read)
        return value if self._dtype == graph.precision.numpy else graph.op.Cast(value, to=graph.precision.onnx)


def concatenated(parts: Sequence[Array]) -> Array:
    """Return `parts` [n,...], one below the other. A single part is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def largest_block(inputs: int, most: int) -> int | None:
    """Return the largest block of at most `most` inputs that divides `inputs`, or None."""
    return next((block for block in sorted(BLOCK_SIZES, reverse=True) if block <= most and inputs % block == 0), None)


def form_of(
    name: WeightsName,
    block_size: int | None,
    on_rounded: OnRounded = lambda name, weight, found: None,
    rounding: RoundingMethod | None = None,
) -> WeightForm:
    """Return the form `name`. Only forms in blocks use `block_size`, only int8 and int4 use `rounding`.

    `rounding` defaults to the nearest code.
    """
    if name in _FLOAT_TYPES:
        return FloatForm(name)
    from sinkprune.export.weights.rounding import RoundedForm, to_nearest

    most_in_block = None if name == "int8" else block_size or DEFAULT_BLOCK_SIZE
    return RoundedForm(name, most_in_block, rounding or to_nearest, on_rounded)


def chosen_forms(
    precision: Precision,
    weights: WeightsName | None,
    vision: WeightsName | None,
    block_size: int | None,
    quantisation: Quantisation | None = None,
) -> WeightForms:
    """Return the requested forms, with defaults for those that are None. Raises `UsageError` for forms that conflict.

    `weights` defaults to the checkpoint's own quantisation, else to `precision`. `vision` defaults to int8 if
    `weights` requests quantised weights, else to the form of `weights`.
    """
    repacked = quantisation is not None and quantisation.repacks(weights)
    decoder = weights or (quantisation.form if quantisation else precision.name)
    # A tower that the checkpoint leaves in floats stays in floats, unless requested otherwise.
    alike = decoder if decoder in _FLOAT_TYPES else "int8"
    tower = vision or (precision.name if quantisation and not weights else alike)
    for option, form in (("--weights", decoder), ("--vision-weights", tower)):
        if form == "fp32" and precision.name == "fp16":
            raise UsageError(f"{option} is fp32, but states are fp16. Export with --precision fp32, or leave it out.")
    groups = quantisation.group_size if quantisation and repacked else None
    in_blocks = bool({"int4", "uint4"} & {decoder, tower}) or groups is not None
    if block_size is not None and not in_blocks:
        raise UsageError(
            f"--block-size is {block_size}, but no weights are int4. Add --weights int4, or leave it out."
        )
    if block_size is not None and block_size not in BLOCK_SIZES:
        raise UsageError(f"--block-size is {block_size}, expected one of {', '.join(map(str, BLOCK_SIZES))}.")
    most = block_size or largest_block(groups or DEFAULT_BLOCK_SIZE, DEFAULT_BLOCK_SIZE)
    return WeightForms(decoder, tower, most if in_blocks else None)
