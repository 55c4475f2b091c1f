"""The linear layers of an OpenVINO model whose matrices are quantised, and how activations are rounded for them."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

_THROUGH = {"Convert": 1, "Reshape": 1, "Unsqueeze": 1, "Subtract": 2, "Multiply": 2}
"""The operators between a constant and its product, with the number of inputs that are followed."""
_CODES = ("i8", "i4", "u4")
"""OpenVINO's names for the types of quantised matrices."""
_AXES = 2
"""The rank of a linear layer's matrix; products with other constants are no layers."""
_LARGEST_GROUP = 128


def quantised_layers(read: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each product of the model `read` with a quantised matrix, and the constants that the matrix is made of.

    These are codes, zero points if there are any, and scales.
    """
    for node in read.get_ops():
        if node.get_type_name() == "MatMul" and len(node.get_input_partial_shape(1)) == _AXES:
            constants = _constants(node.input_value(1).get_node())
            if len(constants) > 1 and constants[0].get_element_type().get_type_name() in _CODES:
                yield node, constants


def _constants(node: Any) -> list[Any]:
    """Return the constants that `node` is computed from; none where it depends on anything else."""
    kind = node.get_type_name()
    if kind == "Constant":
        return [node]
    found = [_constants(node.input_value(place).get_node()) for place in range(_THROUGH.get(kind, 0))]
    return [constant for part in found for constant in part] if all(found) else []


def group_in_int8(read: Any) -> int:
    """Return how many values of a row may share a scale when activations are rounded to int8; 0 for no rounding.

    Larger groups are faster. With a group larger than a block of the weights of `read`, OpenVINO would not round.
    """
    blocks = []
    for _, constants in quantised_layers(read):
        codes, *_, scales = (prod(constant.get_output_shape(0)) for constant in constants)
        blocks.append(codes // scales)
    return min(_LARGEST_GROUP, *blocks) if blocks else 0
