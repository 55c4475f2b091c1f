"""Fills rows up to whole blocks, for processors with AMX.

OpenVINO multiplies rows with a quantised matrix there in blocks of 128, and an incomplete block takes longer than a
whole one: 115 rows take 1.5 times as long as 128. So the last row is repeated until the block is full. The repeated
rows are dropped where rows interact: before attention, and at the end.

Operators that work row by row form regions. Rows are repeated where they enter a region with a quantised matrix, and
dropped where they leave it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.runtime.backends.openvino.layers import quantised_layers

Node = Any
"""An operator or a constant of a model. OpenVINO declares no types."""
Input = Any
"""An input of a node; its source is an output of another node."""
Output = Any
BLOCK = 128
"""Rows of a block."""
FEW = 64
"""Up to so many rows take less time than a whole block."""
_BY_VALUES = ("Add", "Convert", "Divide", "Erf", "Gelu", "Multiply", "Power", "Sigmoid", "Sqrt", "Subtract", "Tanh")
"""Operators that work value by value. All their inputs may have rows."""
_ALONG_AXES = ("MVN", "ReduceMean")
"""Operators that work along the axes of their second input. They work row by row if that is the axis of features."""
_WITH_CONSTANT = ("MatMul", *_ALONG_AXES)
"""Operators that work row by row only if their second input is constant."""
_BY_ROWS = ("ConvertLike", *_WITH_CONSTANT)
"""Operators that work row by row on their first input. Their other inputs have no rows."""
_ROWS = -2
"""The axis of rows."""
_ZERO, _ONE = np.int64(0), np.int64(1)


def fill_blocks(openvino: Any, model: Any) -> None:
    """Make the `model` multiply whole blocks of rows with quantised matrices, without changing its results.

    Up to `FEW` rows stay as they are, and so do the rows of several groups (tiles of a picture, frames of a clip).
    The inputs of an operator must have the same number of rows, or one that the graph's shapes declare.
    """
    for region in _regions(openvino, model):
        _fill_region(openvino.opset15, region)
    model.validate_nodes_and_infer_types()


def _regions(openvino: Any, model: Any) -> list[list[Node]]:
    """Return the connected operators that work row by row, for each such group with a quantised matrix, in order."""
    ordered: Sequence[Node] = model.get_ordered_ops()
    neighbours = _neighbours(openvino, ordered)
    regions: list[set[str]] = []
    for layer, _ in quantised_layers(model):
        name = layer.get_name()
        if name in neighbours and not any(name in region for region in regions):
            regions.append(_connected(name, neighbours))
    return [[node for node in ordered if node.get_name() in region] for region in regions]


def _neighbours(openvino: Any, ordered: Sequence[Node]) -> dict[str, set[str]]:
    """Return the names of all operators that work row by row, each with those that it takes from or gives to."""
    constant: set[str] = set()
    neighbours: dict[str, set[str]] = {}
    for node in ordered:
        name, sources = node.get_name(), {value.get_node().get_name() for value in node.input_values()}
        if node.get_type_name() == "Constant" or (sources and sources <= constant):
            constant.add(name)
        elif _works_by_rows(openvino, node, constant):
            neighbours[name] = sources & neighbours.keys()
            for source in neighbours[name]:
                neighbours[source].add(name)
    return neighbours


def _connected(name: str, neighbours: Mapping[str, set[str]]) -> set[str]:
    """Return `name`, and all that are its neighbours or neighbours of these."""
    found, new = {name}, {name}
    while new:
        new = set().union(*(neighbours[each] for each in new)) - found
        found |= new
    return found


def _works_by_rows(openvino: Any, node: Node, constant: set[str]) -> bool:
    """Return whether a repeated input row gives a repeated output row, and changes no other row."""
    kind = node.get_type_name()
    if kind not in (*_BY_VALUES, *_BY_ROWS) or not _has_rows(node.output(0)):
        return False
    if kind in _WITH_CONSTANT and node.input_value(1).get_node().get_name() not in constant:
        return False
    return kind not in _ALONG_AXES or _is_along_features(openvino, node)


def _is_along_features(openvino: Any, node: Node) -> bool:
    """Return whether `node` computes along the last axis only, and keeps it."""
    axes = _constant_value(openvino, node.input_value(1)).ravel().tolist()
    return axes == [-1] and _rank(node.output(0)) == _rank(node.input_value(0))


def _constant_value(openvino: Any, value: Output) -> Array:
    """Return the value of an output that is computed from constants."""
    node = value.get_node()
    if node.get_type_name() == "Constant":
        return node.get_data()
    result = openvino.Tensor(value.get_element_type(), value.get_shape())
    node.evaluate([result], [openvino.Tensor(_constant_value(openvino, part)) for part in node.input_values()])
    return result.data


def _rank(value: Output) -> int:
    return len(value.get_partial_shape())


def _has_rows(value: Output) -> bool:
    shape = value.get_partial_shape()
    return len(shape) > 1 and (shape[_ROWS].is_dynamic or shape[_ROWS].get_length() > 1)


def _fill_region(ops: Any, region: Sequence[Node]) -> None:
    """Repeat the last row of each input of `region`, and drop the repeated rows from each output."""
    inside = {node.get_name() for node in region}
    entering = _entering(region, inside)
    # The input with the most axes counts all groups: one without an axis of groups may serve several.
    own_rows, filled_rows = _row_numbers(ops, max((value for _, value in entering), key=_rank))
    filled: dict[tuple[str, int], Output] = {}
    for target, value in entering:
        key = value.get_node().get_name(), value.get_index()
        if key not in filled:
            filled[key] = ops.gather(value, filled_rows, np.int64(_ROWS)).output(0)
        target.replace_source_output(filled[key])
    for value in (node.output(0) for node in region):
        targets = [target for target in value.get_target_inputs() if target.get_node().get_name() not in inside]
        if targets:
            _replace(value, ops.gather(value, own_rows, np.int64(_ROWS)).output(0), targets)


def _entering(region: Sequence[Node], inside: set[str]) -> list[tuple[Input, Output]]:
    """Return the inputs of `region` that take rows of other operators, with these rows; `inside` are its names."""
    found = []
    for node in region:
        for place in range(1 if node.get_type_name() in _BY_ROWS else node.get_input_size()):
            value = node.input_value(place)
            if value.get_node().get_name() not in inside and _has_rows(value):
                found.append((node.input(place), value))
    return found


def _replace(value: Output, by: Output, targets: Sequence[Input]) -> None:
    """Give the `targets` another value, with the names of the first."""
    tensor = value.get_tensor()
    by.get_tensor().set_names(tensor.get_names())
    tensor.set_names(set())
    for target in targets:
        target.replace_source_output(by)


def _row_numbers(ops: Any, value: Output) -> tuple[Any, Any]:
    """Return the numbers of the rows of `value`, and the same with the last repeated until blocks are full."""
    last = _rank(value) - 1
    sizes = ops.gather(ops.shape_of(value, "i64"), np.arange(last), _ZERO)
    rows, in_all_groups = ops.gather(sizes, np.int64(last - 1), _ZERO), ops.reduce_prod(sizes, _ZERO)
    unchanged = ops.logical_or(ops.less_equal(rows, np.int64(FEW)), ops.not_equal(rows, in_all_groups))
    missing = ops.select(unchanged, _ZERO, ops.floor_mod(ops.negative(rows), np.int64(BLOCK)))
    own_rows, numbers = (ops.range(_ZERO, count, _ONE, "i64") for count in (rows, ops.add(rows, missing)))
    return own_rows, ops.minimum(numbers, ops.subtract(rows, _ONE))
