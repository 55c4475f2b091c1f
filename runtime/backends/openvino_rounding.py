"""In what groups OpenVINO rounds rows to int8, by how the matrices that they meet are quantised."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

_THROUGH = {"Convert": 1, "Reshape": 1, "Unsqueeze": 1, "Subtract": 2, "Multiply": 2}
"""What stands between a constant and its product: how many inputs of each operator are followed."""
_CODES = ("i8", "i4", "u4")
"""The types of quantised matrices, in openvino's words."""
_AXES = 2
"""A linear layer's matrix has; other constants that something is multiplied with are no layers."""
_LARGEST_GROUP = 128


def group_in_int8(read: Any) -> int:
    """How many values of a row may share a scale when they are rounded to int8 for a model's int8 or 4-bit weights.

    Larger groups are faster; one larger than a block of the weights, and OpenVINO would not round at all. 0 is none.
    """
    blocks = list(_blocks(read))
    return min(_LARGEST_GROUP, *blocks) if blocks else 0


def _blocks(read: Any) -> Iterator[int]:
    """How many inputs share a scale, of each quantised matrix of the model `read`."""
    for node in read.get_ops():
        if node.get_type_name() == "MatMul" and len(node.get_input_partial_shape(1)) == _AXES:
            constants = _constants(node.input_value(1).get_node())
            if len(constants) > 1 and constants[0].get_element_type().get_type_name() in _CODES:
                codes, *_, scales = (prod(constant.get_output_shape(0)) for constant in constants)
                yield codes // scales


def _constants(node: Any) -> list[Any]:
    """The constants that `node` is computed from: codes, zero points where there are any, scales.

    None where it is computed from anything else.
    """
    kind = node.get_type_name()
    if kind == "Constant":
        return [node]
    found = [_constants(node.input_value(place).get_node()) for place in range(_THROUGH.get(kind, 0))]
    return [constant for part in found for constant in part] if all(found) else []
