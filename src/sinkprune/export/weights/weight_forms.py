"""The forms that matrices of linear layers are stored in. A new form is a class here and a line in `form_of`.

A DequantizeLinear in front of the MatMul turns codes into floats. TensorRT takes it, ONNX Runtime and
OpenVINO fuse it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import onnx_ir as ir

from sinkprune.contract.errors import UsageError
from sinkprune.contract.manifest import DialectName
from sinkprune.contract.precision import BLOCK_SIZES, DTYPES, Array, WeightForms, WeightsName
from sinkprune.export.checkpoint.quantisation_config import Quantisation
from sinkprune.export.precision import PRECISIONS, Precision
from sinkprune.export.weights.rounding import RoundedMatrix, RoundingMethod, packed, rounded_from_zero, to_nearest

DEFAULT_BLOCK_SIZE = max(BLOCK_SIZES)
"""Engines round states in groups of at most a block, and larger groups are faster."""
_FLOAT_TYPES: dict[str, np.dtype[Any]] = {
    "fp32": DTYPES["fp32"],
    "fp16": DTYPES["fp16"],
    "bf16": np.dtype(ml_dtypes.bfloat16),
}

OnRounded = Callable[[str, Array, RoundedMatrix], None]
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

    def read(self, graph: Matrices) -> Iterator[tuple[str, Array]]:
        """Yield the name and the values [outputs,inputs] of each part."""
        for name, outputs in self.parts.items():
            yield name, graph.read(name, [outputs, self.inputs])


class Matrices(Protocol):
    """The graph that a matrix is written into, as forms need it."""

    op: Any
    precision: Precision

    def read(self, name: str, shape: Sequence[int]) -> Array:
        """Return the checkpoint's tensor `name` of `shape`."""

    def stored(
        self, name: str, dtype: ir.DataType, shape: Sequence[int], read: Callable[[], ir.TensorProtocol]
    ) -> ir.Value:
        """Return a new weight. `save` calls `read` for its values."""


class WeightForm(Protocol):
    """How the matrix of a linear layer is stored."""

    least_opset: int
    """The first opset that has the nodes of this form."""

    @abstractmethod
    def matrix(self, graph: Matrices, matrix: Matrix) -> ir.Value:
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

    def matrix(self, graph: Matrices, matrix: Matrix) -> ir.Value:
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


class RoundedForm(WeightForm):
    """Rounded at export: int8 with a scale for each output, int4 and uint4 with a scale for each block of inputs."""

    def __init__(
        self, name: WeightsName, most_in_block: int | None, rounding: RoundingMethod, on_rounded: OnRounded
    ) -> None:
        self._name, self._most_in_block = name, most_in_block
        self._rounding, self._on_rounded = rounding, on_rounded
        self.least_opset = 19 if most_in_block is None else 21

    def matrix(self, graph: Matrices, matrix: Matrix) -> ir.Value:
        block = None if self._most_in_block is None else block_of(matrix.name, matrix.inputs, self._most_in_block)

        def read() -> list[Array]:
            parts = [self._rounded(graph, name, weight, block) for name, weight in matrix.read(graph)]
            return [concatenated(same).T for same in zip(*parts, strict=True) if same[0] is not None]

        return dequantised(graph, matrix, self._name, block, read)

    def _rounded(self, graph: Matrices, name: str, weight: Array, block: int | None) -> RoundedMatrix:
        # Reject what the graph's type cannot hold, but round the values as read.
        graph.precision.converted(name, weight)
        block, dtype = block or weight.shape[1], graph.precision.numpy
        if self._name == "uint4":
            found = rounded_from_zero(weight, 15, block, dtype)
        else:
            found = self._rounding(name, weight, 127 if self._name == "int8" else 7, block, dtype)
        self._on_rounded(name, weight, found)
        return found


def dequantised(
    graph: Matrices, matrix: Matrix, form: WeightsName, block: int | None, read: Callable[[], Sequence[Array]]
) -> ir.Value:
    """Return `matrix` [inputs,outputs] as floats, stored as codes and scales, and for uint4 also as zero points.

    `read` returns them in this order: codes [inputs,outputs], the others [inputs/block,outputs]. Without a `block`,
    each output has one scale.
    """
    dtype, codes = ir.DataType[form.upper()], [matrix.inputs, matrix.outputs]
    each = [matrix.outputs] if block is None else [matrix.inputs // block, matrix.outputs]
    shapes = {matrix.name: (dtype, codes), f"{matrix.name}.scale": (graph.precision.onnx, each)}
    if form == "uint4":
        shapes[f"{matrix.name}.zero"] = (dtype, each)
    waiting: dict[str, Array] = {}

    def tensor(name: str) -> ir.TensorProtocol:
        """Return one of the arrays that a call reads. Each is released when it is written, in any order."""
        if name not in waiting:
            waiting.update(zip(shapes, read(), strict=True))
        array, (of_type, shape) = waiting.pop(name), shapes[name]
        if of_type in (ir.DataType.INT4, ir.DataType.UINT4):
            # Two codes in a byte
            return ir.PackedTensor(packed(array), of_type, shape=ir.Shape(shape))
        return ir.Tensor(array.reshape(shape))

    operands = [graph.stored(name, *described, partial(tensor, name)) for name, described in shapes.items()]
    axes: dict[str, int] = {"axis": 1} if block is None else {"axis": 0, "block_size": block}
    floats: ir.Value = graph.op.DequantizeLinear(*operands, **axes)
    # Not every opset infers them, and dialects need shapes.
    floats.shape, floats.type = operands[0].shape, ir.TensorType(graph.precision.onnx)
    return floats


def concatenated(parts: Sequence[Array]) -> Array:
    """Return `parts` [n,...], one below the other. A single part is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def largest_block(inputs: int, most: int) -> int | None:
    """Return the largest block of at most `most` inputs that divides `inputs`, or None."""
    return next((block for block in sorted(BLOCK_SIZES, reverse=True) if block <= most and inputs % block == 0), None)


def block_of(name: str, inputs: int, most: int) -> int:
    """Return the largest block of at most `most` that divides the inputs of the matrix `name`.

    Raises `UsageError`.
    """
    block = largest_block(inputs, most)
    if block is None:
        raise UsageError(
            f"'{name}' has {inputs} inputs, expected a multiple of {min(BLOCK_SIZES)}, the smallest block of 4-bit "
            "weights. Export with --weights int8, or --vision-weights int8 where it is the tower's."
        )
    return block


def form_of(
    name: WeightsName,
    block_size: int | None,
    on_rounded: OnRounded = lambda name, weight, found: None,
    rounding: RoundingMethod = to_nearest,
) -> WeightForm:
    """Return the form `name`. Only forms in blocks use `block_size`, only int8 and int4 use `rounding`."""
    if name in _FLOAT_TYPES:
        return FloatForm(name)
    return RoundedForm(name, None if name == "int8" else block_size or DEFAULT_BLOCK_SIZE, rounding, on_rounded)


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


def check_dialect(forms: WeightForms, dialect: DialectName, repacked: Quantisation | None) -> None:
    """Reject weights that opset20's TensorRT 10.3 does not take; raises `UsageError`.

    `repacked` is the quantisation of matrices whose codes are kept, or None.
    """
    if dialect != "opset20":
        return
    for option, form in (("--weights", forms.decoder), ("--vision-weights", forms.vision)):
        if form == "uint4":
            raise UsageError(
                f"weights are uint4, and TensorRT takes no zero points. Export with {option} int4, which rounds them "
                "again and reports the error, or for other engines with --dialect opset24."
            )
    if repacked and repacked.form == "int8" and repacked.group_size is not None:
        raise UsageError(
            "the checkpoint's int8 has a scale for each group of inputs; opset20 is for TensorRT 10.3, which takes "
            "one an output. Export with --weights int8, which rounds again and reports the error."
        )
