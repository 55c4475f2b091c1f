"""The matrices of linear layers in OpenVINO models: what they are stored as, and how OpenVINO's own exports lay them.

ONNX has a matrix [inputs,outputs], for its MatMul cannot turn one. OpenVINO's exports have it [outputs,inputs], with
the inputs of a block side by side, and its passes and kernels are written for that: it packs such a matrix sooner and
in less memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from sinkprune.contract.precision import Array

_THROUGH = {"Convert": 1, "Reshape": 1, "Unsqueeze": 1, "Subtract": 2, "Multiply": 2}
"""What stands between a constant and its product: how many inputs of each operator are followed."""
_CODES = ("i8", "i4", "u4")
"""The types of quantised matrices, in openvino's words."""
_FOUR_BITS = ("i4", "u4")
_LARGEST_GROUP = 128
_AXES = 2
"""A linear layer's matrix has; other constants that something is multiplied with are no layers."""
# So many rows fit a core's cache while their columns are written.
_ROWS_AT_ONCE = 128


class Matrix(NamedTuple):
    """The matrix of a linear layer, (codes - zeros) * scales, all in openvino's nodes."""

    product: Any
    """The MatMul."""
    codes: Any
    """The constant that holds codes, or the values where nothing is quantised."""
    zeros: Any | None
    """The constant of zero points."""
    scales: Any | None
    """The constant that has a scale for each output, or for each block of inputs and each output."""

    @property
    def blocks(self) -> int:
        """How many scales an output has, at least 1."""
        return _count(self.scales) // self.outputs if self.scales is not None else 1

    @property
    def outputs(self) -> int:
        """Of the layer."""
        width: int = self.product.get_output_partial_shape(0)[-1].get_length()
        return width

    @property
    def inputs(self) -> int:
        """Of the layer."""
        return _count(self.codes) // self.outputs


def matrices(read: Any) -> Iterator[Matrix]:
    """All of the model `read`."""
    for node in read.get_ops():
        if node.get_type_name() != "MatMul" or len(node.get_input_partial_shape(1)) != _AXES:
            continue
        if constants := _constants(node.input_value(1).get_node()):
            codes, *others = constants
            zeros = others.pop(0) if len(others) > 1 else None
            yield Matrix(node, codes, zeros, *others or [None])


def group_in_int8(read: Any) -> int:
    """How many values of a row may share a scale when they are rounded to int8 for a model's int8 or 4-bit weights.

    Larger groups are faster; one larger than a block of the weights, and OpenVINO would not round at all. 0 is none.
    """
    blocks = [matrix.inputs // matrix.blocks for matrix in matrices(read) if _type(matrix.codes) in _CODES]
    return min(_LARGEST_GROUP, *blocks) if blocks else 0


def turn_matrices(read: Any, openvino: Any) -> None:
    """Lay the quantised matrices of the model `read`, of a bundle, as OpenVINO's own exports do.

    Those of floats stay: on processors with AMX OpenVINO 2026.4 fuses the MLP of turned ones, which makes prefill a
    fifth slower where it makes a token a tenth quicker, and with one thread it ends the process.
    """
    for matrix in matrices(read):
        if matrix.scales is None:
            continue
        turned = _turned(matrix, openvino)
        matrix.product.set_attribute("transpose_b", True)
        matrix.product.input(1).replace_source_output(turned.output(0))
    read.validate_nodes_and_infer_types()


def _turned(matrix: Matrix, openvino: Any) -> Any:
    ops, kind = openvino.opset15, matrix.product.get_input_element_type(1)
    outputs, inputs, blocks = matrix.outputs, matrix.inputs, matrix.blocks
    in_blocks = [outputs, blocks, inputs // blocks] if blocks > 1 else [outputs, inputs]
    by_block = [*in_blocks[:-1], 1]
    value = ops.convert(_laid(matrix.codes, inputs, in_blocks, openvino), kind)
    if matrix.zeros is not None:
        value = ops.subtract(value, ops.convert(_laid(matrix.zeros, blocks, by_block, openvino), kind))
    value = ops.multiply(value, _laid(matrix.scales, blocks, by_block, openvino))
    return ops.reshape(value, np.array([outputs, inputs], np.int64), False) if blocks > 1 else value


def _laid(constant: Any, rows: int, shape: Sequence[int], openvino: Any) -> Any:
    """The constant [rows,...] turned, as one of `shape`, in memory of its own."""
    tensor = openvino.Tensor(constant.get_element_type(), openvino.Shape(list(shape)))
    stored, values = tensor.data.reshape(-1), np.asarray(constant.data).reshape(-1)
    if _type(constant) in _FOUR_BITS:
        values = _unpacked(values.view(np.uint8))[: prod(shape)]
        stored.view(np.uint8)[:] = _packed(_turned_array(values.reshape(rows, -1)).reshape(-1))
    else:
        stored[:] = _turned_array(values.reshape(rows, -1)).reshape(-1)
    return openvino.opset15.constant(tensor)


def _turned_array(array: Array) -> Array:
    """`array` [n,m] as [m,n], not as a view."""
    turned = np.empty(array.shape[::-1], array.dtype)
    for start in range(0, len(array), _ROWS_AT_ONCE):
        turned[:, start : start + _ROWS_AT_ONCE] = array[start : start + _ROWS_AT_ONCE].T
    return turned


def _unpacked(pairs: Array) -> Array:
    """Each byte's low half, then its high half."""
    values = np.empty(2 * len(pairs), np.uint8)
    values[0::2], values[1::2] = pairs & 15, pairs >> 4
    return values


def _packed(values: Array) -> Array:
    """Two values in each byte; an odd last one has zeros beside it."""
    pairs: Array = values[0::2].copy()
    pairs[: len(values) // 2] |= values[1::2] << 4
    return pairs


def _constants(node: Any) -> list[Any]:
    """The constants that `node` is computed from, in the order of inputs; none where it takes anything else."""
    kind = node.get_type_name()
    if kind == "Constant":
        return [node]
    found = [_constants(node.input_value(place).get_node()) for place in range(_THROUGH.get(kind, 0))]
    return [constant for part in found for constant in part] if all(found) else []


def _count(constant: Any) -> int:
    return prod(constant.get_output_shape(0))


def _type(constant: Any) -> str:
    name: str = constant.get_element_type().get_type_name()
    return name
