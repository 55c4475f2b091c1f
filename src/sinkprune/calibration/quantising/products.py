"""The products X^T X of the linear layers' inputs X, from which their matrices are rounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from sinkprune.calibration.quantising.subgraphs import GraphRun, Tensors
from sinkprune.contract.precision import Array
from sinkprune.export.rewriting import multiplications, shape_of
from sinkprune.export.weights.calibrated_rounding import InputProducts

_WEIGHT = ".weight"


class Layer(NamedTuple):
    """A linear layer of a graph."""

    value: str
    """The name of its input; layers may share it."""
    inputs: int
    outputs: int


class Products:
    """X^T X of each matrix of a graph on the same prompts, computed on demand, a subgraph of layers at a time.

    Calls in the order of the layers compute each product once.
    """

    def __init__(self, graph: ir.Graph, start: Callable[[], GraphRun]) -> None:
        """`start` returns a run of all prompts through `graph`."""
        self._layers, self._joined = linear_layers(graph), joined_layers(graph)
        self._start, self._run = start, start()
        self._held: dict[str, InputProducts] = {}

    def __call__(self, matrix: str) -> InputProducts:
        """Return the products of the inputs of the layer with the matrix of that name; raises `BackendError`."""
        value = self._layers[matrix].value
        if value not in self._held and not self._run.is_ahead(value):
            self._run = self._start()
        while value not in self._held:
            # Free the old products before the next ones are computed.
            self._held = {}
            sums: dict[str, Array] = {}
            self._run.step(partial(_add, sums))
            self._held = {name: InputProducts(products) for name, products in sums.items()}
        return self._held[value]

    def parts(self, matrix: str) -> Mapping[str, int]:
        """Return the layers that share the matrix of that name: their own matrices' names, and their outputs."""
        return self._joined.get(matrix, {matrix: self._layers[matrix].outputs})

    def outputs(self) -> list[Tensors]:
        """Return the graph's outputs for each prompt; raises `BackendError`."""
        self._held = {}
        return self._run.outputs()


def linear_layers(graph: ir.Graph) -> dict[str, Layer]:
    """Return all linear layers of `graph`, by the names of their matrices of floats."""
    found = {}
    for matrix, node in multiplications(graph).items():
        tensor = graph.initializers[matrix].const_value
        if node.inputs[0] is None or node.inputs[0].name is None or tensor is None:
            raise ValueError(f"the matrix '{matrix}' is multiplied with nothing")
        found[matrix] = Layer(node.inputs[0].name, *shape_of(tensor))
    return found


def joined_layers(graph: ir.Graph) -> dict[str, dict[str, int]]:
    """Return the layers that share a matrix, by its name: the names of their own matrices, and their outputs."""
    found = {}
    for matrix, node in multiplications(graph).items():
        own = matrix.removesuffix(_WEIGHT).rpartition(".")[0]
        uses = [use for use, _ in node.outputs[0].uses()]
        if len(uses) == 1 and uses[0].op_type == "Add":
            uses = [use for use, _ in uses[0].outputs[0].uses()]
        for split in (use for use in uses if use.op_type == "Split" and len(use.inputs) > 1):
            names = [str(value.name) for value in split.outputs]
            # If the checkpoint itself stores one matrix, as in Qwen's towers, the parts have no layers' names.
            if all(name.rpartition(".")[0] == own for name in names):
                widths = _numbers(split.inputs[1])
                found[matrix] = {f"{name}{_WEIGHT}": width for name, width in zip(names, widths, strict=True)}
    return found


def _add(sums: dict[str, Array], value: str, rows: Array) -> None:
    """Add the products of one more prompt."""
    width = rows.shape[-1]
    rows = rows.reshape(-1, width).astype(np.float32, copy=False)
    if value not in sums:
        sums[value] = np.zeros((width, width), np.float32)
    sums[value] += rows.T @ rows


def _numbers(value: ir.Value | None) -> list[int]:
    """Return a constant list of a graph, such as the sizes of a Split."""
    tensor = value.const_value if value is not None else None
    if tensor is None:
        raise ValueError("a matrix is split at places that are computed")
    return tensor.numpy().tolist()
