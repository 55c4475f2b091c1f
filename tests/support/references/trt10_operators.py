"""The operators of TensorRT 10.3 (JetPack 6): whether its ONNX parser accepts a graph, without TensorRT.

The list is docs/operators.md of github.com/onnx/onnx-tensorrt, release 10.1-GA, with what docs/Changelog.md adds for
10.2 and 10.3: tensors as `axes` of Slice. The check is strict. It rejects operators with conditions beyond types and
attributes (control flow, recurrent cells, pooling, resizing), QuantizeLinear, and operators whose output size depends
on values (NonZero). A graph that passes holds only what the list has. It may still fail in TensorRT.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import onnx
from onnx import inliner, shape_inference

from sinkprune.contract.budgets import MAX_TOP_K
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


def fault(model: onnx.ModelProto) -> str:
    """Return the first thing in `model` that is not on the list, with its node; "" if all is.

    Nodes in function bodies are checked at each call. Weights need not be loaded.
    """
    named = deepcopy(model)
    for function in named.functions:
        for node in function.node:
            node.name = f"{function.name}/{node.name}"
    return next(_faults(named), "")


def _faults(model: onnx.ModelProto) -> Iterator[str]:
    functions = {(function.domain, function.name) for function in model.functions}
    for node in [*model.graph.node, *(node for function in model.functions for node in function.node)]:
        known = node.domain in ("", "ai.onnx") and node.op_type in OPERATORS
        if not known and (node.domain, node.op_type) not in functions:
            yield f"{node.name}: {node.op_type} is not on the list"
    newest = (
        OPSET_OF_INT4 if any(t.data_type == onnx.TensorProto.INT4 for t in model.graph.initializer) else MAX_OPSET
    )
    for place in (model, *model.functions):
        for opset in place.opset_import:
            if not opset.domain and opset.version > newest:
                yield f"{getattr(place, 'name', '')}: opset {opset.version}, expected up to {newest}"
    if model.ir_version > MAX_IR_VERSION:
        yield f"IR version {model.ir_version}, expected up to {MAX_IR_VERSION}"
    # Function bodies in the place of calls, and the type of every value.
    inlined = inliner.inline_local_functions(model)
    graph = shape_inference.infer_shapes(inlined, check_type=True, strict_mode=True).graph
    types, known_values = _value_types(graph), constants(graph)
    opset = next(opset.version for opset in inlined.opset_import if not opset.domain)
    for node in graph.node:
        for found in (_of_attributes(node, opset), _of_types(node, types), _of_inputs(node, known_values)):
            yield from (f"{node.name}: {node.op_type} {one}" for one in found)


def _of_attributes(node: onnx.NodeProto, opset: int) -> Iterator[str]:
    known = onnx.defs.get_schema(node.op_type, opset).attributes
    for attribute in node.attribute:
        allowed, value = _ATTRIBUTES.get((node.op_type, attribute.name)), onnx.helper.get_attribute_value(attribute)
        if attribute.name not in known or (allowed is not None and value not in allowed):
            yield f"has {attribute.name} = {value!r}"


def _of_types(node: onnx.NodeProto, types: Mapping[str, str]) -> Iterator[str]:
    read = node.input[1:2] if node.op_type == "DequantizeLinear" else node.input
    for name in filter(None, [*read, *node.output]):
        if types.get(name) not in _ALL:
            yield f"reads or writes '{name}', {types.get(name)}"
    for place in _DATA_INPUTS.get(node.op_type, (0,)):
        if place < len(node.input) and types[node.input[place]] not in OPERATORS[node.op_type]:
            yield f"is given {types[node.input[place]]}"


def _of_inputs(node: onnx.NodeProto, known: Mapping[str, Any]) -> Iterator[str]:
    place = _CONSTANT_INPUTS.get(node.op_type)
    if place is not None and place < len(node.input) and node.input[place] and node.input[place] not in known:
        yield f"computes its input {place}"
    if node.op_type == "DequantizeLinear" and len(node.input) > 2:
        yield "has a zero point"
    if node.op_type == "LayerNormalization" and len(node.output) > 1:
        yield f"gives {len(node.output)} outputs"
    if node.op_type == "TopK" and node.input[1] in known and as_array(known[node.input[1]]).max() > MAX_TOP_K:
        yield f"has K above {MAX_TOP_K}"


def _value_types(graph: onnx.GraphProto) -> dict[str, str]:
    """Return the element type of every value, by its name in ONNX; UNDEFINED for values that are not tensors."""
    values = {
        value.name: value.type.tensor_type.elem_type for value in [*graph.input, *graph.value_info, *graph.output]
    }
    values |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return {name: onnx.TensorProto.DataType.Name(number) for name, number in values.items()}
