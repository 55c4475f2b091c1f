"""Fills rows up to whole blocks, for processors with AMX.

OpenVINO multiplies rows with a quantised matrix there in blocks of 128, and an incomplete block takes longer than a
whole one: 115 rows take 1.5 times as long as 128. So the last row is repeated until the block is full. The repeated
rows are dropped where rows interact: before attention, and at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.runtime.backends.openvino.layers import quantised_layers

BLOCK = 128
"""Rows of a block."""
FEW = 64
"""Up to so many rows take less time than a whole block."""
_ALONG_FEATURES = ("MVN", "ReduceMean")
"""Operators that work row by row on their first input, if the second is the axis of features."""
_BY_A_CONSTANT = ("MatMul", *_ALONG_FEATURES)
"""Operators that work row by row on their first input, if the second is constant."""
_OF_FEATURES = ("ConvertLike", *_BY_A_CONSTANT)
"""Operators that work row by row on their first input; their other inputs have no rows."""
_OF_VALUES = ("Add", "Convert", "Divide", "Erf", "Gelu", "Multiply", "Power", "Sigmoid", "Sqrt", "Subtract", "Tanh")
"""Operators that work value by value."""
_ROWS = -2
"""The axis of rows."""


def fill_blocks(openvino: Any, read: Any) -> None:
    """Make the model `read` multiply whole blocks of rows with quantised matrices, without changing its results.

    Up to `FEW` rows stay as they are, and so do the rows of several groups (tiles of a picture, frames of a clip).
    The inputs of an operator must have the same number of rows, or one that the graph's shapes declare.
    """
    for region in _regions(openvino, read):
        _fill(openvino.opset15, region)
    read.validate_nodes_and_infer_types()


def _regions(openvino: Any, read: Any) -> Iterator[list[Any]]:
    """Yield the connected regions of operators that work row by row and contain a quantised layer, in order."""
    ordered = read.get_ordered_ops()
    constant: set[str] = set()
    regions: dict[str, set[str]] = {}
    for node in ordered:
        kind, name = node.get_type_name(), node.get_name()
        makers = [value.get_node().get_name() for value in node.input_values()]
        if kind == "Constant" or (makers and constant.issuperset(makers)):
            constant.add(name)
        elif (kind not in _BY_A_CONSTANT or makers[1] in constant) and _is_by_rows(openvino, node):
            parts = [regions[maker] for maker in makers if maker in regions]
            region = max(parts, key=len, default=set())
            for part in parts:
                region |= part
                regions.update(dict.fromkeys(part, region))
            region.add(name)
            regions[name] = region
    found = [regions[layer.get_name()] for layer, _ in quantised_layers(read) if layer.get_name() in regions]
    for region in {id(region): region for region in found}.values():
        yield [node for node in ordered if node.get_name() in region]


def _is_by_rows(openvino: Any, node: Any) -> bool:
    """Return whether a repeated input row gives a repeated output row, and changes no other row."""
    kind = node.get_type_name()
    if kind in _ALONG_FEATURES and not _is_along_features(openvino, node):
        return False
    return kind in _OF_VALUES + _OF_FEATURES and _has_rows(node.output(0))


def _is_along_features(openvino: Any, node: Any) -> bool:
    """Return whether `node` computes along the last axis only, and keeps it."""
    rows, axes = node.input_value(0), _constant(openvino, node.input_value(1))
    return axes.ravel().tolist() == [-1] and _rank(node.output(0)) == _rank(rows)


def _constant(openvino: Any, value: Any) -> Array:
    """Return the constant value of `value`, which is computed from constants."""
    node = value.get_node()
    if node.get_type_name() == "Constant":
        return node.get_data()
    made = openvino.Tensor(value.get_element_type(), value.get_shape())
    node.evaluate([made], [openvino.Tensor(_constant(openvino, part)) for part in node.input_values()])
    return made.data


def _rank(value: Any) -> int:
    return len(value.get_partial_shape())


def _has_rows(value: Any) -> bool:
    shape = value.get_partial_shape()
    return len(shape) > 1 and (shape[_ROWS].is_dynamic or shape[_ROWS].get_length() > 1)


def _fill(ops: Any, region: list[Any]) -> None:
    """Repeat the last row of each input of `region`, and drop the repeated rows from each output."""
    within = {node.get_name() for node in region}
    taken = {}
    for node in region:
        places = 1 if node.get_type_name() in _OF_FEATURES else node.get_input_size()
        for place, value in enumerate(node.input_values()[:places]):
            if value.get_node().get_name() not in within and _has_rows(value):
                taken[node.get_name(), place] = node.input(place), value
    # From the input with the most axes: one without an axis of groups may serve several groups.
    kept, repeated = _rows(ops, max((value for _, value in taken.values()), key=_rank))
    full: dict[tuple[str, int], Any] = {}
    for target, value in taken.values():
        key = value.get_node().get_name(), value.get_index()
        if key not in full:
            full[key] = ops.gather(value, repeated, np.int64(_ROWS)).output(0)
        target.replace_source_output(full[key])
    for node in region:
        targets = [
            target for target in node.output(0).get_target_inputs() if target.get_node().get_name() not in within
        ]
        if targets:
            tensor = node.output(0).get_tensor()
            dropped = ops.gather(node.output(0), kept, np.int64(_ROWS)).output(0)
            dropped.get_tensor().set_names(tensor.get_names())
            tensor.set_names(set())
            for target in targets:
                target.replace_source_output(dropped)


def _rows(ops: Any, value: Any) -> tuple[Any, Any]:
    """Return the numbers of the rows of `value`, and the same with the last repeated until blocks are full."""
    last = _rank(value) - 1
    sizes = ops.gather(ops.shape_of(value, "i64"), np.arange(last), np.int64(0))
    rows, in_all = ops.gather(sizes, np.int64(last - 1), np.int64(0)), ops.reduce_prod(sizes, np.int64(0))
    as_it_is = ops.logical_or(ops.less_equal(rows, np.int64(FEW)), ops.not_equal(rows, in_all))
    missing = ops.floor_mod(ops.negative(rows), np.int64(BLOCK))
    count = ops.add(rows, ops.select(as_it_is, np.int64(0), missing))
    zero, one = np.int64(0), np.int64(1)
    kept, filled = (ops.range(zero, size, one, "i64") for size in (rows, count))
    return kept, ops.minimum(filled, ops.subtract(rows, one))
