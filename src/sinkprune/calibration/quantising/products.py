"""The products X^T X of what the linear layers of a graph are given: all that rounding their matrices needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from sinkprune.calibration.quantising.stretches import Passage, Tensors
from sinkprune.contract.precision import Array
from sinkprune.export.rewriting import multiplications, shape_of
from sinkprune.export.weights.calibrated_rounding import Inputs

_WEIGHT = ".weight"


class Layer(NamedTuple):
    """A linear layer."""

    value: str
    """What it is given, by a name; layers may share it."""
    inputs: int
    outputs: int


class Products:
    """X^T X of each matrix of a graph on the same prompts, computed when it is asked for, with those of its stretch.

    Asked for in the order of the layers, each is computed once.
    """

    def __init__(self, graph: ir.Graph, start: Callable[[], Passage]) -> None:
        """`start` puts all prompts in front of `graph`."""
        self._layers, self._joined = linear_layers(graph), joined_layers(graph)
        self._start, self._passage = start, start()
        self._held: dict[str, Inputs] = {}

    def __call__(self, matrix: str) -> Inputs:
        """What the layer with the matrix of that name is given; raises `BackendError`."""
        value = self._layers[matrix].value
        if value not in self._held and not self._passage.is_ahead(value):
            self._passage = self._start()
        while value not in self._held:
            # The old ones go before the new ones come.
            self._held = {}
            sums: dict[str, Array] = {}
            self._passage.step(partial(_add, sums))
            self._held = {name: Inputs(products) for name, products in sums.items()}
        return self._held[value]

    def parts(self, matrix: str) -> Mapping[str, int]:
        """The layers that the matrix of that name is of: the names of their own matrices, and their outputs."""
        return self._joined.get(matrix, {matrix: self._layers[matrix].outputs})

    def outputs(self) -> list[Tensors]:
        """What the graph gives of each prompt; raises `BackendError`."""
        self._held = {}
        return self._passage.outputs()


def linear_layers(graph: ir.Graph) -> dict[str, Layer]:
    """All of `graph`, by the names of their matrices of floats."""
    found = {}
    for matrix, node in multiplications(graph).items():
        tensor = graph.initializers[matrix].const_value
        if node.inputs[0] is None or node.inputs[0].name is None or tensor is None:
            raise ValueError(f"the matrix '{matrix}' is multiplied with nothing")
        found[matrix] = Layer(node.inputs[0].name, *shape_of(tensor))
    return found


def joined_layers(graph: ir.Graph) -> dict[str, dict[str, int]]:
    """The layers that share a matrix, by its name: the names of their own matrices, and their outputs."""
    found = {}
    for matrix, node in multiplications(graph).items():
        own = matrix.removesuffix(_WEIGHT).rpartition(".")[0]
        uses = [use for use, _ in node.outputs[0].uses()]
        if len(uses) == 1 and uses[0].op_type == "Add":
            uses = [use for use, _ in uses[0].outputs[0].uses()]
        for split in (use for use in uses if use.op_type == "Split" and len(use.inputs) > 1):
            names = [str(value.name) for value in split.outputs]
            # Where a checkpoint's own matrix is cut, as in Qwen's towers, the parts have no names of layers.
            if all(name.rpartition(".")[0] == own for name in names):
                widths = _numbers(split.inputs[1])
                found[matrix] = {f"{name}{_WEIGHT}": width for name, width in zip(names, widths, strict=True)}
    return found


def _add(sums: dict[str, Array], value: str, rows: Array) -> None:
    """Count in what layers are given of one more prompt."""
    width = rows.shape[-1]
    rows = rows.reshape(-1, width).astype(np.float32, copy=False)
    if value not in sums:
        sums[value] = np.zeros((width, width), np.float32)
    sums[value] += rows.T @ rows


def _numbers(value: ir.Value | None) -> list[int]:
    """A list that a graph holds, as where to split."""
    tensor = value.const_value if value is not None else None
    if tensor is None:
        raise ValueError("a matrix is split at places that are computed")
    numbers: list[int] = tensor.numpy().tolist()
    return numbers
