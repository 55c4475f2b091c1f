"""The forms that matrices of linear layers are stored in. Adding one is a class here and its line in `form_of`.

Quantised matrices stand in front of their MatMul as DequantizeLinear: TensorRT takes that, ONNX Runtime and OpenVINO
fuse it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import onnx_ir as ir

from sinkprune.contract.errors import UsageError
from sinkprune.contract.manifest import DialectName
from sinkprune.contract.precision import BLOCK_SIZES, DTYPES, Array, WeightForms, WeightsName
from sinkprune.export.checkpoint.quantisation_config import Quantisation
from sinkprune.export.precision import PRECISIONS, Precision
from sinkprune.export.weights.rounding import (
    Rounded,
    RoundedFromZero,
    Rounding,
    packed,
    rounded_from_zero,
    to_nearest,
)

DEFAULT_BLOCK_SIZE = max(BLOCK_SIZES)
"""Engines round states in groups no larger than a block, and larger groups are faster."""
_FLOAT_TYPES: dict[str, np.dtype[Any]] = {
    "fp32": DTYPES["fp32"],
    "fp16": DTYPES["fp16"],
    "bf16": np.dtype(ml_dtypes.bfloat16),
}

OnRounded = Callable[[str, Array, Rounded | RoundedFromZero], None]
"""Told of a matrix that was rounded: the tensor's name, its values [outputs,inputs], and what became of them."""


@dataclass(frozen=True)
class Matrix:
    """The matrix [outputs,inputs] of a linear layer, or of several layers on the same inputs, one below the other."""

    name: str
    """The weight's, in the graph."""
    parts: Mapping[str, int]
    """The checkpoint's tensors, and how many outputs each has."""
    inputs: int

    @property
    def outputs(self) -> int:
        """Of all parts."""
        return sum(self.parts.values())

    @classmethod
    def of_one(cls, name: str, inputs: int, outputs: int) -> Matrix:
        """A tensor of the checkpoint, under its own name."""
        return cls(name, {name: outputs}, inputs)

    def read(self, graph: Matrices) -> Iterator[tuple[str, Array]]:
        """Each part's name and values [outputs,inputs], one after the other."""
        for name, outputs in self.parts.items():
            yield name, graph.read(name, [outputs, self.inputs])


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

    @abstractmethod
    def matrix(self, graph: Matrices, matrix: Matrix) -> ir.Value:
        """[inputs,outputs] in the graph's float type."""

    def joins(self, matrix: Matrix) -> bool:
        """Whether the parts of `matrix` can be stored as one, with the values that each has alone."""
        return True

    def product(self, graph: Matrices, x: ir.Value, matrix: Matrix) -> ir.Value:
        """`x` [...,inputs] times that matrix."""
        product: ir.Value = graph.op.MatMul(x, self.matrix(graph, matrix))
        return product


class FloatForm(WeightForm):
    """Floats of the type `name`, cast to the graph's where that is another."""

    least_opset = 1

    def __init__(self, name: WeightsName) -> None:
        self._name: str = name
        self._dtype = _FLOAT_TYPES[name]

    def matrix(self, graph: Matrices, matrix: Matrix) -> ir.Value:
        def part(name: str, values: Array) -> Array:
            array = graph.precision.converted(name, values)
            # bf16 holds whatever the graph's type does.
            own = PRECISIONS.get(self._name)
            return own.converted(name, array) if own else array.astype(self._dtype)

        def read() -> ir.Tensor[Any]:
            return ir.Tensor(below([part(name, values) for name, values in matrix.read(graph)]).T)

        onnx_type = ir.DataType.from_numpy(self._dtype)
        value = graph.stored(matrix.name, onnx_type, [matrix.inputs, matrix.outputs], read)
        return value if self._dtype == graph.precision.numpy else graph.op.Cast(value, to=graph.precision.onnx)


class RoundedForm(WeightForm):
    """Rounded as it is written: int8 with a scale an output, int4 and uint4 with one for each block of inputs."""

    def __init__(
        self, name: WeightsName, most_in_block: int | None, rounding: Rounding, on_rounded: OnRounded
    ) -> None:
        self._name, self._most_in_block = name, most_in_block
        self._rounding, self._on_rounded = rounding, on_rounded
        self.least_opset = 19 if most_in_block is None else 21

    def matrix(self, graph: Matrices, matrix: Matrix) -> ir.Value:
        block = None if self._most_in_block is None else block_of(matrix.name, matrix.inputs, self._most_in_block)
        others: list[Array] = []

        def codes() -> Array:
            """Read and round the matrix, part by part; scales and zero points are written after its codes."""
            parts = [self._rounded(graph, name, weight, block) for name, weight in matrix.read(graph)]
            codes, *rest = (below(same) for same in zip(*parts, strict=True))
            others.extend(rest)
            return codes.T

        def following() -> Array:
            return others.pop(0).T

        zeros = following if self._name == "uint4" else None
        return dequantised(graph, matrix, self._name, block, codes, following, zeros)

    def _rounded(self, graph: Matrices, name: str, weight: Array, block: int | None) -> Rounded | RoundedFromZero:
        # Refused where the graph's type cannot hold it, rounded from what was read.
        graph.precision.converted(name, weight)
        block, dtype = block or weight.shape[1], graph.precision.numpy
        if self._name == "uint4":
            found: Rounded | RoundedFromZero = rounded_from_zero(weight, 15, block, dtype)
        else:
            found = self._rounding(name, weight, 127 if self._name == "int8" else 7, block, dtype)
        self._on_rounded(name, weight, found)
        return found


def dequantised(
    graph: Matrices,
    matrix: Matrix,
    form: WeightsName,
    block: int | None,
    codes: Callable[[], Array],
    scales: Callable[[], Array],
    zeros: Callable[[], Array] | None,
) -> ir.Value:
    """The matrix of `codes` [inputs,outputs], with `scales` and `zeros` [inputs/block,outputs] or, without a block,
    [outputs]; they are read in this order when the graph is saved."""
    dtype, shape = ir.DataType[form.upper()], [matrix.inputs, matrix.outputs]
    place: dict[str, int] = {"axis": 1} if block is None else {"axis": 0, "block_size": block}
    each = [matrix.outputs] if block is None else [matrix.inputs // block, matrix.outputs]

    def stored(name: str, shape: Sequence[int], read: Callable[[], Array]) -> ir.Value:
        if form == "int8":
            return graph.stored(name, dtype, shape, lambda: ir.Tensor(read()))
        # Two codes in a byte
        return graph.stored(name, dtype, shape, lambda: ir.PackedTensor(packed(read()), dtype, shape=ir.Shape(shape)))

    operands = [stored(matrix.name, shape, codes)]
    operands.append(
        graph.stored(f"{matrix.name}.scale", graph.precision.onnx, each, lambda: ir.Tensor(scales().reshape(each)))
    )
    if zeros is not None:
        operands.append(stored(f"{matrix.name}.zero", each, zeros))
    floats: ir.Value = graph.op.DequantizeLinear(*operands, **place)
    # Not every opset's inference tells them, and dialects ask for shapes.
    floats.shape, floats.type = operands[0].shape, ir.TensorType(graph.precision.onnx)
    return floats


def below(parts: Sequence[Array]) -> Array:
    """`parts` [n,...], one below the other; one alone is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def largest_block(inputs: int, most: int) -> int | None:
    """The largest block of at most `most` that divides so many inputs, if there is one."""
    return next((block for block in sorted(BLOCK_SIZES, reverse=True) if block <= most and inputs % block == 0), None)


def block_of(name: str, inputs: int, most: int) -> int:
    """The largest block of at most `most` that divides the inputs of the matrix `name`; raises `UsageError`."""
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
    rounding: Rounding = to_nearest,
) -> WeightForm:
    """The form of that name; `block_size` is that of forms in blocks, `rounding` the rule of those without zero
    points."""
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
    """What was asked for, and for what was not: `weights` as the checkpoint was quantised or `precision` has it,
    `vision` int8 beside quantised `weights` that were asked for, else as they are.

    Raises `UsageError` for forms that do not go together.
    """
    repacked = quantisation is not None and quantisation.repacks(weights)
    decoder = weights or (quantisation.form if quantisation else precision.name)
    # What a checkpoint leaves in floats stays there unless asked.
    tower = vision or (precision.name if quantisation and not weights else _beside(decoder))
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
    """Refuse weights that TensorRT 10.3, for which opset20 is, does not take; raises `UsageError`.

    `repacked` is how the checkpoint had quantised what is repacked.
    """
    if dialect != "opset20":
        return
    for option, form in (("--weights", forms.decoder), ("--vision-weights", forms.vision)):
        if form == "uint4":
            raise UsageError(
                f"weights are uint4, and TensorRT takes no zero points. Export with {option} int4, which rounds them "
                "again and says by how much they differ, or for other engines with --dialect opset24."
            )
    if repacked and repacked.form == "int8" and repacked.group_size is not None:
        raise UsageError(
            "the checkpoint's int8 has a scale for each group of inputs; opset20 is for TensorRT 10.3, which takes "
            "one an output. Export with --weights int8, which rounds again and says by how much they differ."
        )


def _beside(weights: WeightsName) -> WeightsName:
    """The tower's form beside others in `weights`."""
    return "int8" if weights in ("int8", "int4", "uint4") else weights
