"""Signatures and inferred shapes of ONNX operators, each made once: they are most of a small export's time."""

from __future__ import annotations

import onnx
import onnx_ir as ir

try:
    from onnxscript._internal import _inference
except ImportError:
    # Another release may have it elsewhere; exports then take longer.
    _inference = None

_LARGEST = 20
"""How many numbers a constant may have for onnxscript to infer shapes from it."""


def keep_signatures() -> None:
    """Let onnx_ir make one for each operator, where it makes one for each node."""
    make = ir.schemas.OpSignature.from_op_schema
    made: dict[tuple[str, str, int], ir.schemas.OpSignature] = {}

    def kept(schema: onnx.defs.OpSchema) -> ir.schemas.OpSignature:
        key = schema.domain, schema.name, schema.since_version
        if key not in made:
            made[key] = make(schema)
        return made[key]

    ir.schemas.OpSignature.from_op_schema = staticmethod(kept)


def keep_inferred_shapes() -> None:
    """Let onnxscript infer the outputs of alike nodes once: those with equal attributes, inputs and constants."""
    if not hasattr(_inference, "_do_onnx_inference"):
        return
    infer = _inference._do_onnx_inference
    made: dict[object, list[tuple[ir.TypeProtocol | None, ir.Shape | None]]] = {}

    def described(value: ir.Value | None) -> object:
        if value is None:
            return None
        shape = None if value.shape is None else tuple(str(size) for size in value.shape)
        constant = value.const_value
        content = constant.tobytes() if constant is not None and constant.size <= _LARGEST else None
        return str(value.type), shape, content

    def kept(node: ir.Node) -> None:
        fresh = all(output.type is None and output.shape is None for output in node.outputs)
        if not fresh or any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values()):
            infer(node)
            return
        attributes = tuple(sorted(str(attribute) for attribute in node.attributes.values()))
        operator = node.domain, node.op_type, node.version, len(node.outputs)
        key = operator, attributes, tuple(described(value) for value in node.inputs)
        if key not in made:
            infer(node)
            made[key] = [(output.type, output.shape) for output in node.outputs]
            return
        for output, (of_type, shape) in zip(node.outputs, made[key], strict=True):
            output.type, output.shape = of_type, None if shape is None else shape.copy()

    _inference._do_onnx_inference = kept
