"""The quantised matrices of a graph's file, from its codes, scales and zero points alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from sinkprune.contract.precision import Array


def initializers(path: Path) -> dict[str, Array]:
    """Return the weights and constants of a graph's file, by their names."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def stored_matrices(path: Path) -> dict[str, tuple[Array, int]]:
    """Return every quantised matrix [inputs,outputs], and how many inputs share a scale, by the tensor's name.

    The inputs are in the layer's own order.
    """
    values, found = initializers(path), {}
    for node in onnx.load(path, load_external_data=False).graph.node:
        if node.op_type != "DequantizeLinear":
            continue
        codes, scales, *zeros = (values[name].astype(np.float32) for name in node.input)
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        block = attributes.get("block_size", len(codes))
        if "block_size" in attributes:
            assert attributes["axis"] == 0
            scales, *zeros = (np.repeat(by_block, block, axis=0) for by_block in (scales, *zeros))
        else:
            assert attributes["axis"] == 1 and scales.shape == codes.shape[1:]
        matrix = (codes - zeros[0] if zeros else codes) * scales
        order = values.get(f"{node.input[0]}.order")
        found[node.input[0]] = (matrix if order is None else matrix[np.argsort(order)], block)
    return found
