"""Checks without TensorRT whether the ONNX parser of TensorRT 10.3 (JetPack 6) accepts a graph.

The list is docs/operators.md of github.com/onnx/onnx-tensorrt, release 10.1-GA, with what docs/Changelog.md adds for
10.2 and 10.3: tensors as `axes` of Slice. The check is strict. It rejects operators with conditions beyond types and
attributes (control flow, recurrent cells, pooling, resizing), QuantizeLinear, and operators whose output size depends
on values (NonZero). A graph that passes holds only what the list has. It may still fail in TensorRT.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NoReturn

import onnx
from onnx import inliner, shape_inference

from sinkprune.contract.budgets import MAX_TOP_K
from sinkprune.contract.errors import EnginesError
from sinkprune.engines.plugin_graph import as_array, constants

MAX_OPSET = 20
OPSET_OF_INT4 = 21
"""The list has DequantizeLinear of INT4, which needs this opset in ONNX; the parser does not compare opsets."""
MAX_IR_VERSION = 10
"""The version of ONNX 1.16, which the parser of 10.3 is built with."""

_FLOATS = frozenset({"FLOAT", "FLOAT16", "BFLOAT16"})
_NUMBERS = _FLOATS | {"INT32", "INT64"}
_ALL = _NUMBERS | {"BOOL"}
_CODES = frozenset({"INT8", "INT4"})
_NAMES = {
    _FLOATS: """
        Acos Acosh Asin Asinh Atan Atanh Ceil Celu Clip Conv ConvTranspose Cos Cosh CumSum Einsum Elu Erf Exp Floor
        Gelu Gemm HardSigmoid HardSwish InstanceNormalization LayerNormalization LeakyRelu Log LogSoftmax
        LpNormalization MatMul Mean PRelu Pow Reciprocal Round Selu Sigmoid Sin Sinh Softmax Softplus Softsign Sqrt
        Tan Tanh ThresholdedRelu""",
    _NUMBERS: """
        Abs Add ArgMax ArgMin DepthToSpace Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mod Mul Neg Pad
        Range ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
        ReduceSumSquare Relu ScatterElements ScatterND Shrink Sign SpaceToDepth Sub Sum TopK""",
    frozenset({"BOOL"}): "And Not Or Xor",
    _CODES: "DequantizeLinear",
    _ALL: """
        Cast CastLike Concat Constant ConstantOfShape Expand EyeLike Flatten Gather GatherElements GatherND Identity
        OneHot Reshape Shape Size Slice Split Squeeze Tile Transpose Trilu Unsqueeze Where""",
}
OPERATORS = {name: types for types, names in _NAMES.items() for name in names.split()}
"""The operators of the list, each with the types of its data."""

# The inputs that hold this data; the first, for all others.
_DATA_INPUTS = {"Where": (1,), "OneHot": (2,), "Pow": (0, 1)}
# The inputs that must be constants.
_CONSTANT_INPUTS = {"CumSum": 1, "OneHot": 1, "Pad": 3, "Squeeze": 1, "Unsqueeze": 1}
_CONSTANT_INPUTS |= {name: 1 for name in OPERATORS if name.startswith("Reduce")}
_ATTRIBUTES: dict[tuple[str, str], tuple[object, ...]] = {
    ("TopK", "sorted"): (1,),
    ("ScatterND", "reduction"): (b"none",),
    # Other reductions need a plugin of TensorRT's own.
    ("ScatterElements", "reduction"): (b"none",),
    ("Constant", "sparse_value"): (),
    ("Constant", "value_string"): (),
    ("Constant", "value_strings"): (),
}


def check_trt10(model: onnx.ModelProto, graph: str) -> None:
    """Raise `EnginesError` if TensorRT 10.3 cannot parse `model`, the bundle's graph named `graph`.

    The error names the first node outside the list. Nodes in function bodies are checked at each call. Weights need
    not be loaded.
    """
    model = _with_full_names(model)
    _check_operators(model, graph)
    int4 = any(tensor.data_type == onnx.TensorProto.INT4 for tensor in model.graph.initializer)
    _check_versions(model, graph, OPSET_OF_INT4 if int4 else MAX_OPSET)
    inferred = _inlined(model, graph)
    types, known = _value_types(inferred), constants(inferred)
    opset = next(opset.version for opset in model.opset_import if not opset.domain)
    for node in inferred.node:
        _check_attributes(graph, node, opset)
        _check_types(graph, node, types)
        _check_inputs(graph, node, known)


_REMEDY = "Export the bundle with --dialect opset20."


def _refuse(graph: str, node: onnx.NodeProto, found: str, expected: str) -> NoReturn:
    raise EnginesError(
        f"graph '{graph}', node '{node.name}': {node.op_type} {found}; TensorRT 10.3 takes {expected}. {_REMEDY}"
    )


def _with_full_names(model: onnx.ModelProto) -> onnx.ModelProto:
    named = deepcopy(model)
    for function in named.functions:
        for node in function.node:
            node.name = f"{function.name}/{node.name}"
    return named


def _check_operators(model: onnx.ModelProto, graph: str) -> None:
    functions = {(function.domain, function.name) for function in model.functions}
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    strangers = [
        node
        for node in nodes
        if (node.domain, node.op_type) not in functions
        and (node.domain not in ("", "ai.onnx") or node.op_type not in OPERATORS)
    ]
    if strangers:
        names = ", ".join(sorted({".".join(filter(None, [node.domain, node.op_type])) for node in strangers}))
        raise EnginesError(
            f"graph '{graph}', node '{strangers[0].name}': {strangers[0].op_type} is not in TensorRT 10.3's list of "
            f"operators, nor a function of this model; the graph holds {names}. The list is that of "
            f"sinkprune.engines.trt10_checker. {_REMEDY}"
        )


def _check_versions(model: onnx.ModelProto, graph: str, newest_opset: int) -> None:
    bodies = {f"graph '{graph}'": model.opset_import}
    bodies |= {f"graph '{graph}', function {function.name}": function.opset_import for function in model.functions}
    found = [
        (place, "opset", opset.version, newest_opset)
        for place in bodies
        for opset in bodies[place]
        if not opset.domain
    ]
    found.append((f"graph '{graph}'", "IR version", model.ir_version, MAX_IR_VERSION))
    for place, what, version, newest in found:
        if version > newest:
            raise EnginesError(f"{place} is of {what} {version}; TensorRT 10.3 takes up to {newest}. {_REMEDY}")


def _inlined(model: onnx.ModelProto, graph: str) -> onnx.GraphProto:
    """Return the graph with function bodies in place of calls, and with the type of every value."""
    try:
        inlined = inliner.inline_local_functions(model)
        return shape_inference.infer_shapes(inlined, check_type=True, strict_mode=True).graph
    except (shape_inference.InferenceError, onnx.checker.ValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EnginesError(f"graph '{graph}' is not valid ONNX: {reason}. {_REMEDY}") from error


def _check_attributes(graph: str, node: onnx.NodeProto, opset: int) -> None:
    known = onnx.defs.get_schema(node.op_type, opset).attributes
    for attribute in node.attribute:
        if attribute.name not in known:
            _refuse(graph, node, f"has attribute '{attribute.name}'", ", ".join(sorted(known)) or "none")
        allowed = _ATTRIBUTES.get((node.op_type, attribute.name))
        if allowed == ():
            others = sorted(name for name in known if _ATTRIBUTES.get((node.op_type, name)) != ())
            _refuse(graph, node, f"has attribute '{attribute.name}'", ", ".join(others))
        value = onnx.helper.get_attribute_value(attribute)
        if allowed is not None and value not in allowed:
            _refuse(graph, node, f"has {attribute.name} = {value!r}", f"{attribute.name} = {allowed[0]!r}")


def _check_types(graph: str, node: onnx.NodeProto, types: Mapping[str, str]) -> None:
    read = node.input[1:2] if node.op_type == "DequantizeLinear" else node.input
    for name in filter(None, [*read, *node.output]):
        found = types.get(name, "a type that cannot be inferred")
        if found not in _ALL:
            _refuse(graph, node, f"reads or writes '{name}', {found}", ", ".join(sorted(_ALL)))
    for place in _DATA_INPUTS.get(node.op_type, (0,)):
        if place < len(node.input) and (found := types[node.input[place]]) not in OPERATORS[node.op_type]:
            _refuse(graph, node, f"is given {found}", ", ".join(sorted(OPERATORS[node.op_type])))


def _check_inputs(graph: str, node: onnx.NodeProto, known: Mapping[str, Any]) -> None:
    place = _CONSTANT_INPUTS.get(node.op_type)
    if place is not None and place < len(node.input) and node.input[place] and node.input[place] not in known:
        _refuse(graph, node, f"computes its input {place}", "a constant there")
    if node.op_type == "DequantizeLinear" and len(node.input) > 2:
        _refuse(graph, node, "has a zero point", "none")
    if node.op_type == "LayerNormalization" and len(node.output) > 1:
        _refuse(graph, node, f"gives {len(node.output)} outputs", "the first alone")
    if node.op_type == "TopK" and node.input[1] in known:
        most = as_array(known[node.input[1]]).max()
        if most > MAX_TOP_K:
            _refuse(graph, node, f"has K = {most}", f"up to {MAX_TOP_K}")


def _value_types(graph: onnx.GraphProto) -> dict[str, str]:
    """Return the element type of every value, by its name in ONNX; UNDEFINED for values that are not tensors."""
    values = {
        value.name: value.type.tensor_type.elem_type for value in [*graph.input, *graph.value_info, *graph.output]
    }
    values |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return {name: onnx.TensorProto.DataType.Name(number) for name, number in values.items()}
