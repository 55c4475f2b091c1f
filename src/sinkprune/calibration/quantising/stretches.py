"""Cuts a graph into stretches of a few linear layers, and runs them one after the other on all prompts.

So the weights of one stretch are in memory at a time, and each stretch runs once. Tensors that later stretches need
are kept for every prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import onnx_ir as ir

from sinkprune.contract.errors import BackendError
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends.onnxruntime.library import import_onnxruntime, session_options, words

Tensors = Mapping[str, Array]
"""Inputs or outputs of a graph by name."""


class Session:
    """A graph with its weights in `folder`.

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


OpenSession = Callable[[ir.Graph], Session]
"""Returns a session of a part of a graph."""


class Stretch(NamedTuple):
    """Consecutive linear layers of a graph, by names of values."""

    inputs: tuple[str, ...]
    """The layers' inputs in order; layers may share one."""
    leaves: tuple[str, ...]
    """Values that a later stretch needs, or that are outputs of the graph."""


class Passage:
    """A run of all prompts through a graph, stretch by stretch."""

    def __init__(self, graph: ir.Graph, open_session: OpenSession, feeds: Iterable[Tensors]) -> None:
        """Start before the first stretch. `feeds` are each prompt's inputs; `graph` has only needed outputs."""
        self._graph, self._open, self._feeds = graph, open_session, list(feeds)
        self._carried: list[Tensors] = [{} for _ in self._feeds]
        self._left = stretches(graph)

    def is_ahead(self, value: str) -> bool:
        """Return whether the value of that name is an input of a layer that has not run yet."""
        return any(value in stretch.inputs for stretch in self._left)

    def step(self, use: Callable[[str, Array], None] | None = None) -> None:
        """Run the next stretch, and call `use` with the name and the value of each layer's input for each prompt.

        Raises `BackendError`, and `IndexError` after the last stretch.
        """
        stretch = self._left.pop(0)
        inputs = stretch.inputs if use else ()
        # Values that are known already pass by the session.
        known_names = {*self._feeds[0], *self._carried[0]}
        wanted = [name for name in dict.fromkeys((*stretch.leaves, *inputs)) if name not in known_names]
        session = self._open(_part(self._graph, self._carried[0], wanted))
        for number, feed in enumerate(self._feeds):
            known = {**feed, **self._carried[number]}
            known |= session(known)
            self._carried[number] = {name: known[name] for name in stretch.leaves}
            if use:
                for name in inputs:
                    use(name, known[name])

    def outputs(self) -> list[Tensors]:
        """Run the remaining stretches, and return the graph's outputs for each prompt; raises `BackendError`."""
        while self._left:
            self.step()
        return self._carried


def stretches(graph: ir.Graph) -> list[Stretch]:
    """Return all stretches of `graph`, cut at the places between layers where the fewest values must be kept.

    In a transformer these are after the residual sums that end attention and MLP. Values that depend on no matrix,
    such as masks from positions, are not kept but computed again.
    """
    layers, spans = _layers_and_spans(graph)

    def kept(gap: int) -> list[str]:
        """Return the values that are computed before the node at that place, and needed from there on."""
        return [name for name, span in spans.items() if span.first < gap <= span.last]

    between = [
        min((kept(gap) for gap in range(before.last + 1, after.first + 1)), key=len)
        for (_, before), (_, after) in pairwise(layers)
    ]
    found, inputs = list[Stretch](), list[str]()
    for number, (name, _) in enumerate(layers):
        inputs.append(name)
        neighbours = between[max(number - 1, 0) : number + 2]
        if number < len(between) and len(between[number]) == min(map(len, neighbours)):
            found.append(Stretch(tuple(inputs), tuple(between[number])))
            inputs = []
    return [*found, Stretch(tuple(inputs), tuple(str(value.name) for value in graph.outputs))]


class _Span(NamedTuple):
    """Places among a graph's nodes."""

    first: int
    last: int


def _layers_and_spans(graph: ir.Graph) -> tuple[list[tuple[str, _Span]], dict[str, _Span]]:
    """Return the products with matrices of any form, each with its input's name; and the spans of values.

    A span is the place where a value that depends on matrices is computed, and the last place that needs it.
    """
    layers, spans = list[tuple[str, _Span]](), dict[str, _Span]()
    fixed, end = set(graph.initializers), len(graph)
    for place, node in enumerate(graph):
        inputs = [str(value.name) for value in node.inputs if value is not None]
        outputs = [str(value.name) for value in node.outputs]
        varying = [name for name in inputs if name not in fixed]
        if not varying:
            fixed.update(outputs)
            continue
        is_layer = node.op_type == "MatMul" and varying == inputs[:1]
        if is_layer:
            before = layers.pop() if layers and layers[-1][0] == inputs[0] else None
            layers.append((inputs[0], _Span(before[1].first if before else place, place)))
        spans |= {name: spans[name]._replace(last=place) for name in varying if name in spans}
        if is_layer or any(name in spans for name in varying):
            spans |= {name: _Span(place, place) for name in outputs}
    for value in graph.outputs:
        if value.name in spans:
            spans[value.name] = spans[value.name]._replace(last=end)
    return layers, spans


def _part(graph: ir.Graph, known: Tensors, wanted: Sequence[str]) -> ir.Graph:
    """Return the part of `graph` that computes the `wanted` values from its inputs and the `known` values."""
    inputs = [str(value.name) for value in graph.inputs]
    part = ir.convenience.extract(graph, [*inputs, *known], wanted)
    for value in part.inputs:
        if (array := known.get(str(value.name))) is not None:
            value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), None
    return part
