"""Splits a graph into subgraphs of a few linear layers, and runs them one after the other on all prompts.

So the weights of one subgraph are in memory at a time, and each subgraph runs once. Tensors that later subgraphs need
are kept for every prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import onnx_ir as ir

from sinkprune.contract.errors import BackendError
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends.onnxruntime.library import import_onnxruntime, session_options, words

Tensors = Mapping[str, Array]
"""Inputs or outputs of a graph by name."""


class GraphSession:
    """A graph, or a part of one, with its weights in `folder`.

    Activations stay floats before quantised weights: rounding them too is an engine's choice.
    """

    def __init__(self, graph: ir.Graph, version: int, folder: Path, threads: int) -> None:
        """Load the graph; `version` is ONNX's IR version. Raises `BackendError`."""
        ort = import_onnxruntime("sinkprune-calibrate quantize")
        self.name = str(graph.name)
        options = session_options(ort)
        options.intra_op_num_threads = threads
        options.enable_mem_pattern = False
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        data = ir.to_proto(ir.Model(graph, ir_version=version)).SerializeToString()
        try:
            self._session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"], enable_fallback=0)
        except Exception as error:
            # onnxruntime has no common base class for its errors.
            raise BackendError(f"onnxruntime cannot load graph '{self.name}': {words(error)}") from error
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return all outputs by name, from inputs by name; raises `BackendError`."""
        feeds: dict[str, Any] = {name: array for name, array in inputs.items() if name in self._inputs}
        try:
            outputs = self._session.run(self._outputs, feeds)
        except Exception as error:
            raise BackendError(
                f"graph '{self.name}' failed in onnxruntime: {words(error)}. If memory ran out, end other programs; "
                "if not, export the bundle again."
            ) from error
        return dict(zip(self._outputs, outputs, strict=True))


OpenSession = Callable[[ir.Graph], GraphSession]
"""Returns a session of a subgraph."""


class Subgraph(NamedTuple):
    """Consecutive linear layers of a graph and the operators around them, by names of values."""

    layer_inputs: tuple[str, ...]
    """The layers' inputs in order; layers may share one."""
    outputs: tuple[str, ...]
    """Values that a later subgraph needs, or that are outputs of the graph."""


class GraphRun:
    """A run of all prompts through a graph, subgraph by subgraph."""

    def __init__(self, graph: ir.Graph, open_session: OpenSession, feeds: Iterable[Tensors]) -> None:
        """Start before the first subgraph. `feeds` are each prompt's inputs; `graph` has only needed outputs."""
        self._graph, self._open, self._feeds = graph, open_session, list(feeds)
        self._kept: list[Tensors] = [{} for _ in self._feeds]
        self._remaining = split_graph(graph)

    def is_ahead(self, value: str) -> bool:
        """Return whether the value of that name is an input of a layer that has not run yet."""
        return any(value in subgraph.layer_inputs for subgraph in self._remaining)

    def step(self, use: Callable[[str, Array], None] | None = None) -> None:
        """Run the next subgraph, and call `use` with the name and the value of each layer's input for each prompt.

        Raises `BackendError`, and `IndexError` after the last subgraph.
        """
        subgraph = self._remaining.pop(0)
        used = subgraph.layer_inputs if use else ()
        # No session computes the values that are known already.
        known_names = {*self._feeds[0], *self._kept[0]}
        wanted = [name for name in dict.fromkeys((*subgraph.outputs, *used)) if name not in known_names]
        session = self._open(_extract(self._graph, self._kept[0], wanted))
        for number, feed in enumerate(self._feeds):
            known = {**feed, **self._kept[number]}
            known |= session(known)
            self._kept[number] = {name: known[name] for name in subgraph.outputs}
            if use:
                for name in used:
                    use(name, known[name])

    def outputs(self) -> list[Tensors]:
        """Run the remaining subgraphs, and return the graph's outputs for each prompt; raises `BackendError`."""
        while self._remaining:
            self.step()
        return self._kept


def split_graph(graph: ir.Graph) -> list[Subgraph]:
    """Return all subgraphs of `graph`, cut at the places between layers where the fewest values must be kept.

    In a transformer these are after the residual sums that end attention and MLP. Values that depend on no matrix,
    such as masks from positions, are not kept but computed again.
    """
    layers, live_ranges = _layers(graph), _live_ranges(graph)

    def live(place: int) -> list[str]:
        """Return the values that are computed before the node at that place, and needed from there on."""
        return [name for name, span in live_ranges.items() if span.first < place <= span.last]

    boundaries = [
        min((live(place) for place in range(before.last + 1, after.first + 1)), key=len)
        for before, after in pairwise(layers)
    ]
    found, inputs = list[Subgraph](), list[str]()
    for number, layer in enumerate(layers):
        inputs.append(layer.input)
        # A cut is a boundary that keeps no more values than the boundaries next to it.
        neighbours = boundaries[max(number - 1, 0) : number + 2]
        if number < len(boundaries) and len(boundaries[number]) == min(map(len, neighbours)):
            found.append(Subgraph(tuple(inputs), tuple(boundaries[number])))
            inputs = []
    return [*found, Subgraph(tuple(inputs), tuple(str(value.name) for value in graph.outputs))]


class _Layers(NamedTuple):
    """Linear layers that share an input, with the places of the first and the last among the graph's nodes."""

    input: str
    first: int
    last: int


class _LiveRange(NamedTuple):
    """The place of the node that computes a value, and that of the last node that needs it."""

    first: int
    last: int


def _layers(graph: ir.Graph) -> list[_Layers]:
    """Return the products with matrices of any form; consecutive products of one input are together."""
    found: list[_Layers] = []
    for place, node, varying in _varying_nodes(graph):
        if _is_layer(node, varying):
            if found and found[-1].input == varying[0]:
                found[-1] = found[-1]._replace(last=place)
            else:
                found.append(_Layers(varying[0], place, place))
    return found


def _live_ranges(graph: ir.Graph) -> dict[str, _LiveRange]:
    """Return the live ranges of all values that depend on matrices."""
    ranges: dict[str, _LiveRange] = {}
    for place, node, varying in _varying_nodes(graph):
        needed = [name for name in varying if name in ranges]
        ranges |= {name: ranges[name]._replace(last=place) for name in needed}
        if needed or _is_layer(node, varying):
            ranges |= {str(value.name): _LiveRange(place, place) for value in node.outputs}
    outputs = [str(value.name) for value in graph.outputs]
    return ranges | {name: ranges[name]._replace(last=len(graph)) for name in outputs if name in ranges}


def _varying_nodes(graph: ir.Graph) -> Iterator[tuple[int, ir.Node, list[str]]]:
    """Yield each node that depends on the graph's inputs, with its place and the names of its inputs that do."""
    constant = set(graph.initializers)
    for place, node in enumerate(graph):
        varying = [str(value.name) for value in node.inputs if value is not None and value.name not in constant]
        if varying:
            yield place, node, varying
        else:
            constant.update(str(value.name) for value in node.outputs)


def _is_layer(node: ir.Node, varying: Sequence[str]) -> bool:
    value = node.inputs[0] if node.op_type == "MatMul" else None
    return value is not None and varying == [value.name]


def _extract(graph: ir.Graph, known: Tensors, wanted: Sequence[str]) -> ir.Graph:
    """Return the part of `graph` that computes the `wanted` values from its inputs and the `known` values."""
    inputs = [str(value.name) for value in graph.inputs]
    part = ir.convenience.extract(graph, [*inputs, *known], wanted)
    for value in part.inputs:
        if (array := known.get(str(value.name))) is not None:
            value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), None
    return part
