"""Signatures of ONNX operators, each made once."""

from __future__ import annotations

import onnx
import onnx_ir as ir


def keep_signatures() -> None:
    """Let onnx_ir make one for each operator, where it makes one for each node: a third of a small export's time."""
    make = ir.schemas.OpSignature.from_op_schema
    made: dict[tuple[str, str, int], ir.schemas.OpSignature] = {}

    def kept(schema: onnx.defs.OpSchema) -> ir.schemas.OpSignature:
        key = schema.domain, schema.name, schema.since_version
        if key not in made:
            made[key] = make(schema)
        return made[key]

    ir.schemas.OpSignature.from_op_schema = staticmethod(kept)
