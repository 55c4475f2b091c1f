"""The loaded engines of a bundle.

The baseline and every budget run the same weight engines. A plan adds weightless engines in between.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from threading import Lock
from typing import Any

import numpy as np

from sinkprune.contract.manifest import MODULATION, Manifest
from sinkprune.contract.plans import Plan
from sinkprune.contract.precision import DTYPES
from sinkprune.contract.reports.progress import OnProgress, unreported
from sinkprune.runtime.backends import Backend, Decoder, Engine, Tensor
from sinkprune.runtime.families.rotary import Rotary

Wrap = Callable[[str, Engine, Backend], Engine]
"""Receives a graph's name, its loaded engine and the backend; returns the engine to run in its place."""


class Chain:
    """The engines of one bundle on one backend, with their names in the graph contract."""

    def __init__(
        self,
        manifest: Manifest,
        backend: Backend,
        load: Callable[[str], Engine],
        load_decoder: Callable[[str], Decoder],
        progress: OnProgress = unreported,
    ) -> None:
        """Load the weight engines; `load` and `load_decoder` return the engine of a graph, by the graph's name."""
        self.backend, self._load = backend, load
        self.model = model = manifest.language_model
        self.dtype: np.dtype[Any] = DTYPES[manifest.precision]
        self.segments = manifest.segments
        widths = {tensor.name: tensor.shape[-1] for tensor in manifest.graphs["vision"].outputs}
        self.visual_token_bytes = self.dtype.itemsize * (int(widths["tokens"]) + manifest.deepstack_width)
        """The bytes of the vision tower's output for one token."""
        self.several_images = manifest.max_images > 1
        self.rotary = Rotary(model.rope_theta, model.head_dim, self.dtype, model.rope_sections, model.rope_factor)
        self._prefills = set[tuple[Any, ...]]()
        """The kinds of prefills that are complete."""
        self._plan_engines: dict[str, Engine] = {}
        self._loading = Lock()
        loaded, total = count(), 3 + len(self.segments) + manifest.modulates

        def counted(graph: str) -> str:
            progress("loading the engines", next(loaded), total, "engines")
            return graph

        self.vision = load(counted("vision"))
        self.projector = load(counted(manifest.projector)) if manifest.projector else None
        self.decoders = [load_decoder(counted(f"decoder_{segment}")) for segment in range(len(self.segments))]
        self.last = load(counted(manifest.last_graph))
        """The engine after the decoder: `head`, or `expert` in a policy."""
        self.modulation = load(counted(MODULATION)) if manifest.modulates else None
        """The engine of what the expert reads of a step's time; None if the expert reads the time itself."""
        self._deepstack = manifest.deepstack_width
        self.deepstack_token = self.deepstack_zeros(1)

    def deepstack_zeros(self, rows: int) -> dict[str, Tensor]:
        """Return the additional inputs of `decoder_0` for text rows, by name: zeros [1,rows,E], or no input."""
        if not self._deepstack:
            return {}
        return {"deepstack": self.backend.tensor(np.zeros((1, rows, self._deepstack), self.dtype))}

    def plan_engine(self, graph: str) -> Engine:
        """Return a weightless engine of a plan, and load it on the first use."""
        with self._loading:
            if graph not in self._plan_engines:
                self._plan_engines[graph] = self._load(graph)
            return self._plan_engines[graph]

    @property
    def first_uses(self) -> int:
        """The number of weightless engines that are loaded, and of kinds of prefills that are complete.

        A request that raises it takes longer than usual.
        """
        return len(self._plan_engines) + len(self._prefills)

    def note_prefill(self, plan: Plan | None, text: int, visual: int) -> None:
        """Note that a prefill of `plan` is complete, with so many rows of text and pictures.

        There is one kind, except where engines compile what they first meet.
        """
        kind = (*(plan.graphs if plan else ()), text, visual) if self.backend.compiles_lengths else ()
        self._prefills.add(kind)

    def load_plan(self, plan: Plan | None) -> None:
        """Load the engines of `plan`, so that the time of a request does not include loading."""
        with self.backend.turn:
            for graph in plan.graphs if plan else ():
                self.plan_engine(graph)
