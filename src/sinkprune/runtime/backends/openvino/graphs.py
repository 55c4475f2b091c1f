"""Graphs of OpenVINO, with KV caches as its states and, with AMX, whole blocks of rows.

With AMX, OpenVINO multiplies rows with a quantised matrix in blocks of 128, and 115 rows take 1.5 times as long as
128. So the last row is repeated until the block is full, where rows enter a region of operators that work row by row.
The repeated rows are dropped where they leave it.

OpenVINO's CPU plugin updates a cache in place if the cache is a state that is gathered by beam, gets new rows
appended, and is read by a ScaledDotProductAttention. OpenVINO's own conversion of ONNX's Attention does not lead to
that: it copies keys for every query head, and checks for rows that attend to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from itertools import chain, repeat
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from sinkprune.contract.manifest import TensorSpec
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends.kv_cache import cache_names
from sinkprune.runtime.backends.models import Model, domain_of, message_class

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


# OpenVINO declares no types.
Node = Any
Input = Any
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
    constant: set[str] = set()
    # By the names of operators that work row by row: those that they take rows from or give rows to.
    neighbours: dict[str, set[str]] = {}
    for node in ordered:
        name, sources = node.get_name(), {value.get_node().get_name() for value in node.input_values()}
        if node.get_type_name() == "Constant" or (sources and sources <= constant):
            constant.add(name)
        elif _works_by_rows(openvino, node, constant):
            neighbours[name] = sources & neighbours.keys()
            for source in neighbours[name]:
                neighbours[source].add(name)
    regions: list[set[str]] = []
    for layer, _ in quantised_layers(model):
        name = layer.get_name()
        if name in neighbours and not any(name in region for region in regions):
            region, new = {name}, {name}
            while new:
                new = set().union(*(neighbours[each] for each in new)) - region
                region |= new
            regions.append(region)
    return [[node for node in ordered if node.get_name() in region] for region in regions]


def _works_by_rows(openvino: Any, node: Node, constant: set[str]) -> bool:
    """Return whether a repeated input row gives a repeated output row, and changes no other row."""
    kind = node.get_type_name()
    if kind not in (*_BY_VALUES, *_BY_ROWS) or not _has_rows(node.output(0)):
        return False
    if kind in _WITH_CONSTANT and node.input_value(1).get_node().get_name() not in constant:
        return False
    if kind not in _ALONG_AXES:
        return True
    # Along the last axis only, which it keeps.
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
            kept = ops.gather(value, own_rows, np.int64(_ROWS)).output(0)
            kept.get_tensor().set_names(value.get_tensor().get_names())
            value.get_tensor().set_names(set())
            for target in targets:
                target.replace_source_output(kept)


def _entering(region: Sequence[Node], inside: set[str]) -> list[tuple[Input, Output]]:
    """Return the inputs of `region` that take rows of other operators, with these rows; `inside` are its names."""
    found = []
    for node in region:
        for place in range(1 if node.get_type_name() in _BY_ROWS else node.get_input_size()):
            value = node.input_value(place)
            if value.get_node().get_name() not in inside and _has_rows(value):
                found.append((node.input(place), value))
    return found


def _row_numbers(ops: Any, value: Output) -> tuple[Any, Any]:
    """Return the numbers of the rows of `value`, and the same with the last repeated until blocks are full."""
    last = _rank(value) - 1
    sizes = ops.gather(ops.shape_of(value, "i64"), np.arange(last), _ZERO)
    rows, in_all_groups = ops.gather(sizes, np.int64(last - 1), _ZERO), ops.reduce_prod(sizes, _ZERO)
    unchanged = ops.logical_or(ops.less_equal(rows, np.int64(FEW)), ops.not_equal(rows, in_all_groups))
    missing = ops.select(unchanged, _ZERO, ops.floor_mod(ops.negative(rows), np.int64(BLOCK)))
    own_rows, numbers = (ops.range(_ZERO, count, _ONE, "i64") for count in (rows, ops.add(rows, missing)))
    return own_rows, ops.minimum(numbers, ops.subtract(rows, _ONE))


WEIGHTS = ".bin"
"""The suffix of an engine's file of weights."""
BEAM = "beam_idx"
"""The input that the gather of states needs. It is always 0, because there is one answer."""
_DTYPES = {"f32": "float32", "f16": "float16", "i64": "int64", "boolean": "bool"}
_STORED_SMALLER = ("decompression_0", "disabled_constant_folding_0")
"""The marks of a Convert of weights that are stored in a smaller type than that of the computation."""


@cache
def reader_of(openvino: Any) -> GraphReader:
    """Return the one reader of this process, and with it OpenVINO's one `Core`.

    When a CPU plugin is freed after an older one, it restores that one's stack for signals, which is gone. The next
    Ctrl-C would end the process (openvino 2026.4). So this one is never freed, nor is another that a thread opens at
    the same moment: a `Core` and its extensions hold each other.
    """
    return GraphReader(openvino)


class GraphReader:
    """Reads the ONNX files of a bundle into OpenVINO models, with its own `core`, which also compiles them."""

    def __init__(self, openvino: Any) -> None:
        self._ov, self._ops, self.core = openvino, openvino.opset15, openvino.Core()
        # On some processors it keeps reading matrices from a mapped file, and a truncated file would end the process.
        # So it reads all weights into its own memory.
        self.core.set_property({"ENABLE_MMAP": False})
        extension = openvino.frontend.onnx.ConversionExtension
        # Held here, because the core does not keep them alive.
        self._extensions = [extension("Attention", self._attention), extension("TensorScatter", self._appended)]
        for added in self._extensions:
            self.core.add_extension(added)

    def read(self, model: Model, *, gives_rows: bool = False) -> Any:
        """Return the graph of `model`, with its caches as states; `BEAM` is an input where there are any.

        With `gives_rows`, decoder segments return the new rows of their caches, named as the caches were.

        A bundle's graph is an ONNX file. A graph without weights is read from memory, because it may be loaded after
        its file was replaced. An engine is in openvino's own format. Raises `BackendError`, and openvino's
        `RuntimeError`.
        """
        read = self._engine(model) if model.built else self._of_bundle(model, gives_rows)
        for node in read.get_ops():
            if node.get_type_name() != "Convert":
                continue
            weight = node.input_value(0).get_node()
            if weight.get_type_name() == "Constant" and weight.get_element_type().get_type_name() in ("bf16", "f16"):
                # Without the marks, OpenVINO holds the matrix in fp32 too.
                for mark in _STORED_SMALLER:
                    node.get_rt_info()[mark] = True
        return read

    def _engine(self, model: Model) -> Any:
        with paths(model) as path:
            read = self.core.read_model(path, path.with_suffix(WEIGHTS))
        states = cache_names(model.spec)
        kept = replace(
            model.spec,
            inputs=tuple(tensor for tensor in model.spec.inputs if tensor.name not in states.values()),
            outputs=tuple(tensor for tensor in model.spec.outputs if tensor.name not in states),
        )
        taken = [tensor for tensor in _specs(read.inputs) if tensor.name != BEAM]
        replace(model, spec=kept).check_interface(taken, _specs(read.outputs))
        return read

    def _of_bundle(self, model: Model, gives_rows: bool) -> Any:
        with paths(model) as path:
            read = self.core.read_model(path if model.weights else inlined(model.onnx))
        model.check_interface(_specs(read.inputs), _specs(read.outputs))
        self._keep_caches(read, cache_names(model.spec), gives_rows)
        return read

    def _keep_caches(self, read: Any, caches: Mapping[str, str], gives_rows: bool) -> None:
        """Turn `caches`, given as inputs by their outputs, from inputs and outputs into states of the model."""
        if not caches:
            return
        beam = self._ops.parameter([-1], np.int32, name=BEAM)
        beam.output(0).get_tensor().set_names({BEAM})
        read.add_parameters([beam])
        sinks = []
        for name, past_name in caches.items():
            past, grown = read.input(past_name), read.output(name)
            info = self._ov.op.util.VariableInfo()
            info.data_shape, info.data_type, info.variable_id = past.partial_shape, past.element_type, name
            state = self._ov.op.util.Variable(info)
            empty = [size.get_length() if size.is_static else 0 for size in past.partial_shape]
            start = self._ops.constant(np.zeros(empty, past.element_type.to_dtype()))
            before = self._ops.read_value(start, state)
            rows = self._ops.gather(before, beam, np.int64(0))
            for target in past.get_target_inputs():
                appended = target.get_node().get_type_name() == "Concat"
                target.replace_source_output((rows if appended else before).output(0))
            joined = grown.get_node().input_value(0)
            sinks.append(self._ops.assign(joined.get_node(), state))
            read.remove_result(grown.get_node())
            read.remove_parameter(past.get_node())
            if gives_rows:
                new = joined.get_node().input_value(1)
                joined.get_tensor().set_names(set())
                new.get_tensor().set_names({name})
                read.add_results([self._ops.result(new)])
        read.add_sinks(sinks)
        read.validate_nodes_and_infer_types()

    def _attention(self, node: Any) -> Any:
        """Convert ONNX's Attention on [B,H,S,h], [B,Hkv,T,h] and an optional mask, as our graphs have it."""
        query, key, value = (node.get_input(place) for place in range(3))
        masks = [node.get_input(place) for place in range(3, node.get_input_size())]
        masks = [mask for mask in masks if mask.get_node().get_type_name() != "NullNode"]
        heads, kv_heads = (tensor.partial_shape[1].get_length() for tensor in (query, key))
        if heads != kv_heads:
            key, value = (self._for_heads(tensor, heads // kv_heads) for tensor in (key, value))
        scale = None
        if node.has_attribute("scale"):
            scale = np.array(node.get_attribute("scale", 0.0), query.element_type.to_dtype())
        mask = masks[0] if masks else None
        return self._ops.scaled_dot_product_attention(query, key, value, mask, scale).outputs()

    def _for_heads(self, tensor: Any, group: int) -> Any:
        """Repeat keys or values [B,Hkv,T,h] for the `group` query heads that share them: [B,Hkv*group,T,h]."""
        _, kv_heads, _, width = tensor.partial_shape
        apart = self._ops.unsqueeze(tensor, np.int64(2))
        shape = np.array([1, 1, group, 1, 1], np.int64)
        repeated = self._ops.broadcast(apart, shape, broadcast_spec="BIDIRECTIONAL")
        joined = np.array([0, kv_heads.get_length() * group, -1, width.get_length()], np.int64)
        return self._ops.reshape(repeated, joined, True)

    def _appended(self, node: Any) -> Any:
        """Convert TensorScatter to a Concat, because a state has no unused rows."""
        return self._ops.concat([node.get_input(0), node.get_input(1)], 2).outputs()


@contextmanager
def paths(model: Model) -> Iterator[Path]:
    """Yield the path of a model's file, checked together with its weights; raises what `Model.by_path` raises.

    Without weights nothing is checked, and the path may lead to another file.
    """
    with ExitStack() as stack:
        if model.built:
            for name in (model.name, str(Path(model.name).with_suffix(WEIGHTS))):
                stack.enter_context(model.folder[name].by_path())
        elif model.weights:
            stack.enter_context(model.by_path())
        yield model.file.path


def _specs(ports: Any) -> list[TensorSpec]:
    return [
        TensorSpec(
            port.any_name,
            _DTYPES.get(port.element_type.get_type_name(), port.element_type.get_type_name()),
            tuple(size.get_length() if size.is_static else str(size) for size in port.partial_shape),
        )
        for port in ports
    ]


def inlined(data: bytes) -> bytes:
    """Return a checked ONNX file with the body of each function at its calls, for libraries without functions."""
    model = message_class("Model").FromString(data)
    if not model.functions:
        return data
    functions = {(domain_of(function), function.name, function.overload): function for function in model.functions}
    expanded = message_class("Model")()
    expanded.CopyFrom(model)
    del expanded.graph.node[:], expanded.functions[:]
    expanded.graph.node.extend(_expanded(model.graph.node, functions, "inlined"))
    return bytes(expanded.SerializeToString())


def _expanded(nodes: Any, functions: dict[Any, Any], prefix: str) -> Iterator[Any]:
    """Yield `nodes`, and for each call the nodes of its function, whose own values begin with `prefix`."""
    for number, node in enumerate(nodes):
        function = functions.get((domain_of(node), node.op_type, node.overload))
        if function is None:
            yield node
        else:
            yield from _expanded(_body(function, node, f"{prefix}.{number}"), functions, f"{prefix}.{number}")


def _body(function: Any, call: Any, prefix: str) -> Iterator[Any]:
    """Yield the nodes of `function` on the values of `call`."""
    # A missing input has no name anywhere. A missing output keeps its name, because other nodes may read it.
    inputs = dict(zip(function.input, chain(call.input, repeat("")), strict=False))
    outputs = {name: other for name, other in zip(function.output, call.output, strict=False) if other}
    names = {"": "", **inputs, **outputs}
    attributes = {attribute.name: attribute for attribute in (*function.attribute_proto, *call.attribute)}
    for node in function.node:
        own = message_class("Node")()
        own.CopyFrom(node)
        own.name = f"{prefix}.{node.name}"
        for values in (own.input, own.output):
            values[:] = [names.get(name, f"{prefix}.{name}") for name in values]
        del own.attribute[:]
        for attribute in node.attribute:
            if not attribute.ref_attr_name:
                own.attribute.append(attribute)
            elif attribute.ref_attr_name in attributes:
                own.attribute.append(attributes[attribute.ref_attr_name])
                own.attribute[-1].name = attribute.name
        yield own
