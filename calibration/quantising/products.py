"""The products X^T X of what the linear layers of a graph are given: all that rounding their matrices needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import onnx_ir as ir

from sinkprune.calibration.quantising.sessions import Session
from sinkprune.calibration.quantising.walk import Tensors
from sinkprune.contract.precision import Array
from sinkprune.export.rewriting import multiplications, shape_of

MOST_BYTES = 2 << 30
"""What the products that are held at a time may take, unless one layer's alone take more."""

OpenSession = Callable[[ir.Graph, Sequence[str]], Session]
"""Makes a session of a graph that gives what is named."""


class Products:
    """X^T X of each matrix of a graph on the same prompts, computed when it is asked for, with those of the layers
    behind it that fit beside it.

    Asked for in the order of the layers, each is computed once.
    """

    def __init__(
        self,
        read: Callable[[], ir.Graph],
        open_session: OpenSession,
        feeds: Iterable[Tensors],
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """`read` gives the graph anew each time; `feeds` are what it is given. More than one layer's products take
        `most_bytes` at most."""
        self._read, self._open, self._feeds, self._most_bytes = read, open_session, list(feeds), most_bytes
        self._inputs = inputs_of_matrices(read())
        self._held: dict[str, Array] = {}

    def __call__(self, matrix: str) -> Array:
        """[inputs,inputs] fp32, of the layer with the matrix of that name."""
        value, _ = self._inputs[matrix]
        if value not in self._held:
            # The old ones go before the new ones come.
            self._held = {}
            self._held = self._collected(matrix)
        return self._held[value]

    def _collected(self, first: str) -> dict[str, Array]:
        """The products of as many layers as may be held, from that of the matrix `first` on."""
        names = list(self._inputs)
        products: dict[str, Array] = {}
        for value, width in map(self._inputs.__getitem__, names[names.index(first) :]):
            held = sum(array.nbytes for array in products.values())
            if value not in products:
                if products and held + 4 * width * width > self._most_bytes:
                    break
                products[value] = np.zeros((width, width), np.float32)
        session = self._open(_tapped(self._read(), list(products)), [_tap(value) for value in products])
        for feed in self._feeds:
            found = session(feed)
            for value, sums in products.items():
                rows = found[_tap(value)].reshape(-1, len(sums)).astype(np.float32, copy=False)
                sums += rows.T @ rows
        return products


def inputs_of_matrices(graph: ir.Graph) -> dict[str, tuple[str, int]]:
    """By the name of each matrix: the value it is multiplied with, and how many inputs that has."""
    found = {}
    for matrix, node in multiplications(graph).items():
        tensor = graph.initializers[matrix].const_value
        if node.inputs[0] is None or node.inputs[0].name is None or tensor is None:
            raise ValueError(f"the matrix '{matrix}' is multiplied with nothing")
        found[matrix] = node.inputs[0].name, shape_of(tensor)[0]
    return found


def _tapped(graph: ir.Graph, values: Sequence[str]) -> ir.Graph:
    """`graph` with `values` as outputs too."""
    nodes = {node.inputs[0].name: node for node in multiplications(graph).values() if node.inputs[0] is not None}
    dtype = next(value.dtype for value in graph.outputs if value.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16))
    for value in values:
        tap = ir.Node("", "Identity", [nodes[value].inputs[0]])
        tap.outputs[0].name, tap.outputs[0].type = _tap(value), ir.TensorType(dtype)
        graph.insert_before(nodes[value], tap)
        graph.outputs.append(tap.outputs[0])
    return graph


def _tap(value: str) -> str:
    return f"tapped {value}"
