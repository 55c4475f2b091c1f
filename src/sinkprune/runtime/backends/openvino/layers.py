"""The linear layers of an OpenVINO model whose matrices are quantised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_THROUGH = {"Convert": 1, "Reshape": 1, "Unsqueeze": 1, "Subtract": 2, "Multiply": 2}
"""What stands between a constant and its product: how many inputs of each operator are followed."""
_CODES = ("i8", "i4", "u4")
"""The types of quantised matrices, in openvino's words."""
_AXES = 2
"""A linear layer's matrix has; other constants that something is multiplied with are no layers."""


def quantised_layers(read: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Each product of the model `read` with such a matrix, and what that is computed from.

    That is codes, zero points where there are any, and scales: constants all.
    """
    for node in read.get_ops():
        if node.get_type_name() == "MatMul" and len(node.get_input_partial_shape(1)) == _AXES:
            constants = _constants(node.input_value(1).get_node())
            if len(constants) > 1 and constants[0].get_element_type().get_type_name() in _CODES:
                yield node, constants


def _constants(node: Any) -> list[Any]:
    """The constants that `node` is computed from; none where it is computed from anything else."""
    kind = node.get_type_name()
    if kind == "Constant":
        return [node]
    found = [_constants(node.input_value(place).get_node()) for place in range(_THROUGH.get(kind, 0))]
    return [constant for part in found for constant in part] if all(found) else []
