"""Frames become inputs of the vision tower where the tower runs: resized, padded or cropped, and normalised.

The host computes weights for each size of frames once. A graph without weights of its own does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Backend, Tensor
from sinkprune.runtime.backends.small_graphs import GraphWriter
from sinkprune.runtime.media.frame import Frame

COLUMNS_FIRST, ROWS_FIRST = "frames", "frames-rows-first"
"""The names of the graphs, and of their engines: Pillow begins with either axis."""
_REMEMBERED = 8
"""Sizes of frames whose weights are kept."""
_MOST_PIXELS = 1 << 23
"""The most pixels of a frame, 3840x2160 among them: a graph holds each several times as floats."""


class FramePlan(Protocol):
    """How frames of one size become views of the tower's size. Equal plans have equal weights."""

    def __hash__(self) -> int: ...

    def weights(self, form: FrameForm) -> tuple[str, dict[str, Array]] | None:
        """Return the name of the graph and its inputs that depend on the plan; None where only the host is exact."""


@dataclass(frozen=True)
class FrameForm:
    """A family's graphs of frames."""

    graphs: Mapping[str, GraphWriter]
    """By their names."""
    block: int
    """Resized pixels that are computed at a time."""
    constants: Mapping[str, Array]
    """Inputs that are the same for all frames."""
    sizes: Mapping[str, tuple[int, int, int]]
    """The smallest, usual and largest size of each dimension that differs, for engines of one range of shapes."""
    masked: bool = False
    """Whether pixels outside the resized picture are 0 after they are normalised."""


class PlannedFrame(NamedTuple):
    """A frame with its plan."""

    frame: Frame
    plan: FramePlan
    tables: Mapping[str, Array]
    """The tower's inputs beside pixels."""


class FrameGraph:
    """The graphs of frames of a family on a backend. Threads may share it."""

    def __init__(self, backend: Backend, form: FrameForm) -> None:
        self._backend, self._form = backend, form
        self._engine = lru_cache(lambda name: backend.load_small(name, form.graphs[name]))
        with backend.turn:
            # Pillow seldom begins with rows.
            self._engine(COLUMNS_FIRST)
        self._weights = lru_cache(_REMEMBERED)(lambda plan: plan.weights(form))
        self._tensors = lru_cache(_REMEMBERED)(self._new_tensors)

    def planned(
        self, frame: Frame, plans: Sequence[FramePlan], tables: Mapping[str, Array] = MappingProxyType({})
    ) -> FrameInputs | None:
        """Return a frame to be prepared by `plans`; None where the host must prepare it, with the same result."""
        if not plans or not all(self._takes(frame, plan) for plan in plans):
            return None
        return FrameInputs(self, tuple(PlannedFrame(frame, plan, tables) for plan in plans))

    def _takes(self, frame: Frame, plan: FramePlan) -> bool:
        width, height = frame.size
        found = self._weights(plan) if width * height <= _MOST_PIXELS else None
        if found is None:
            return False
        name, weights = found
        shapes = {"frame": (1, height, width, 3), **{key: array.shape for key, array in weights.items()}}
        ranges = self._backend.frame_ranges(name)
        sizes = [zip(ranges[key].min, shape, ranges[key].max, strict=True) for key, shape in shapes.items() if ranges]
        return all(least <= size <= most for each in sizes for least, size, most in each)

    def run(self, planned: Sequence[PlannedFrame]) -> dict[str, Tensor]:
        """Return the tower's inputs of frames of one plan, by name; called in a `turn`."""
        plan, frame = planned[0].plan, planned[0].frame
        if frame.on_host:
            arrays = [each.frame.pixels for each in planned]
            pixels = self._backend.tensor(np.stack(arrays) if len(arrays) > 1 else arrays[0][None])
        else:
            pixels = self._backend.borrow(frame.pixels)
        name, tensors = self._tensors(plan, frame.bgr)
        tables = {
            key: self._backend.tensor(np.concatenate([each.tables[key] for each in planned]))
            for key in planned[0].tables
        }
        return {**self._engine(name)({**tensors, "frame": pixels}), **tables}

    def _new_tensors(self, plan: FramePlan, bgr: bool) -> tuple[str, dict[str, Tensor]]:
        found = self._weights(plan)
        assert found is not None
        name, weights = found
        given = {**weights, **self._form.constants, "channels": np.arange(3)[:: -1 if bgr else 1]}
        if bgr:
            given |= {bias: given[bias][..., ::-1] for bias in ("columns_bias", "rows_bias") if bias in given}
        return name, {key: self._backend.tensor(np.ascontiguousarray(array)) for key, array in given.items()}


@dataclass(frozen=True)
class FrameInputs:
    """Pictures, in order, whose inputs of the tower are computed where it runs."""

    graph: FrameGraph
    parts: tuple[PlannedFrame | dict[str, Array], ...]
    """Frames, and inputs of pictures that the host prepared."""

    def prepared(self, backend: Backend) -> dict[str, Tensor]:
        """Return the inputs by name, joined along the axis of groups; called in a `turn`."""
        planned = [part for part in self.parts if isinstance(part, PlannedFrame)]
        alike = {(each.plan, each.frame.bgr) for each in planned if each.frame.on_host}
        on_host = sum(each.frame.on_host for each in planned)
        if len(alike) == 1 and on_host == len(self.parts) <= backend.prepares_frames:
            return self.graph.run(planned)
        runs = [
            self.graph.run([part])
            if isinstance(part, PlannedFrame)
            else {name: backend.tensor(array) for name, array in part.items()}
            for part in self.parts
        ]
        return runs[0] if len(runs) == 1 else {name: backend.stack([run[name] for run in runs]) for name in runs[0]}


def joined(inputs: Sequence[dict[str, Array] | FrameInputs]) -> FrameInputs:
    """Return the inputs of several pictures, some of them frames, for one call of the tower."""
    graph = next(one.graph for one in inputs if isinstance(one, FrameInputs))
    parts = [(one,) if isinstance(one, dict) else one.parts for one in inputs]
    return FrameInputs(graph, tuple(part for own in parts for part in own))
