"""A graph in stretches of a few linear layers, which run one after the other on all prompts.

So no more than one stretch's weights are in memory, and none is run twice. What a stretch gives to those behind it is
kept of every prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import onnx_ir as ir

from sinkprune.calibration.quantising.sessions import Session
from sinkprune.contract.precision import Array

Tensors = Mapping[str, Array]
"""What a graph takes or gives, by name."""

OpenSession = Callable[[ir.Graph], Session]
"""Makes a session of a part of a graph."""


class Stretch(NamedTuple):
    """Some of a graph's linear layers that follow each other, by names of values."""

    inputs: tuple[str, ...]
    """What they multiply their matrices with, in their order; some share one."""
    leaves: tuple[str, ...]
    """What is there behind it, and needed still: by a later stretch, or as an output of the graph."""


class Passage:
    """All prompts on their way through a graph, in front of the same stretch."""

    def __init__(self, graph: ir.Graph, open_session: OpenSession, feeds: Iterable[Tensors]) -> None:
        """In front of the first. `feeds` are what the graph is given; what it gives should be what is wanted only."""
        self._graph, self._open, self._feeds = graph, open_session, list(feeds)
        self._carried: list[Tensors] = [{} for _ in self._feeds]
        self._left = stretches(graph)

    def is_ahead(self, value: str) -> bool:
        """Whether layers that have not run yet are given the value of that name."""
        return any(value in stretch.inputs for stretch in self._left)

    def step(self, use: Callable[[str, Array], None] | None = None) -> None:
        """Run the next stretch. `use` is called with what its layers are given, by name and prompt.

        Raises `BackendError`, and `IndexError` behind the last.
        """
        stretch = self._left.pop(0)
        inputs = stretch.inputs if use else ()
        # What is there already goes past it.
        there = {*self._feeds[0], *self._carried[0]}
        wanted = [name for name in dict.fromkeys((*stretch.leaves, *inputs)) if name not in there]
        session = self._open(_part(self._graph, self._carried[0], wanted))
        for number, feed in enumerate(self._feeds):
            known = {**feed, **self._carried[number]}
            known |= session(known)
            self._carried[number] = {name: known[name] for name in stretch.leaves}
            if use:
                for name in inputs:
                    use(name, known[name])

    def outputs(self) -> list[Tensors]:
        """What the graph gives of each prompt, when all stretches have run; raises `BackendError`."""
        while self._left:
            self.step()
        return self._carried


def stretches(graph: ir.Graph) -> list[Stretch]:
    """All of `graph`, cut wherever between two layers as little as possible has to be kept.

    In a transformer that is behind the sums that end attention and MLP. What no matrix went into, as masks that are
    made of positions, is not kept but computed again.
    """
    layers, spans = _layers_and_spans(graph)

    def kept(gap: int) -> list[str]:
        """What is computed before the node at that place, and needed from there on."""
        return [name for name, span in spans.items() if span.first < gap <= span.last]

    between = [
        min((kept(gap) for gap in range(before.last + 1, behind.first + 1)), key=len)
        for (_, before), (_, behind) in pairwise(layers)
    ]
    found, inputs = list[Stretch](), list[str]()
    for number, (name, _) in enumerate(layers):
        inputs.append(name)
        beside = between[max(number - 1, 0) : number + 2]
        if number < len(between) and len(between[number]) == min(map(len, beside)):
            found.append(Stretch(tuple(inputs), tuple(between[number])))
            inputs = []
    return [*found, Stretch(tuple(inputs), tuple(str(value.name) for value in graph.outputs))]


class _Span(NamedTuple):
    """Places among a graph's nodes."""

    first: int
    last: int


def _layers_and_spans(graph: ir.Graph) -> tuple[list[tuple[str, _Span]], dict[str, _Span]]:
    """Products with matrices, of whatever form, each with what is multiplied; and by the names of the values that
    matrices went into, where they are computed and where they are needed last."""
    layers, spans = list[tuple[str, _Span]](), dict[str, _Span]()
    fixed, end = set(graph.initializers), len(graph)
    for place, node in enumerate(graph):
        given = [str(value.name) for value in node.inputs if value is not None]
        outputs = [str(value.name) for value in node.outputs]
        varying = [name for name in given if name not in fixed]
        if not varying:
            fixed.update(outputs)
            continue
        is_layer = node.op_type == "MatMul" and varying == given[:1]
        if is_layer:
            before = layers.pop() if layers and layers[-1][0] == given[0] else None
            layers.append((given[0], _Span(before[1].first if before else place, place)))
        spans |= {name: spans[name]._replace(last=place) for name in varying if name in spans}
        if is_layer or any(name in spans for name in varying):
            spans |= {name: _Span(place, place) for name in outputs}
    for value in graph.outputs:
        if value.name in spans:
            spans[value.name] = spans[value.name]._replace(last=end)
    return layers, spans


def _part(graph: ir.Graph, given: Tensors, wanted: Sequence[str]) -> ir.Graph:
    """What of `graph` computes the `wanted` values, from its inputs and those that are `given`."""
    taken = [str(value.name) for value in graph.inputs]
    part = ir.convenience.extract(graph, [*taken, *given], wanted)
    for value in part.inputs:
        if (array := given.get(str(value.name))) is not None:
            value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), None
    return part
