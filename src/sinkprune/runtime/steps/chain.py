"""The graphs of a model in a chain: tower, sanitizer, projector, decoder segments and selects.

The baseline and every budget run the same weight engines. A plan adds weightless engines in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from math import prod
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sinkprune.contract.budgets import Plan
from sinkprune.contract.errors import NumericsError
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import DTYPES, Array
from sinkprune.contract.progress import OnProgress, unreported
from sinkprune.runtime.backends import Backend, Decoder, Engine, Tensor, TokenDecoder
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.families import Rotary

if TYPE_CHECKING:
    from sinkprune.runtime.frames import FrameInputs

Wrap = Callable[[str, Engine, Backend], Engine]
"""Receives a graph's name, its loaded engine and the backend; returns the engine to run in its place.

Where `Backend.joins_segments`, the engine `tokens` computes new tokens, and the graphs `decoder_*` only prompts. Its
inputs are those of all segments, with `decoder_0/` or so before all names but `hidden` and caches.
"""


class Chain:
    """The engines of one bundle on one backend, with their names in the graph contract."""

    def __init__(
        self,
        manifest: Manifest,
        backend: Backend,
        load: Callable[[str], Engine],
        load_decoder: Callable[[str], Decoder],
        load_token_decoder: Callable[[str], TokenDecoder],
        progress: OnProgress = unreported,
    ) -> None:
        """Load the weight engines; `load` and `load_decoder` return the engine of a graph, by the graph's name.

        `load_token_decoder` returns what `Backend.load_token_decoder` does, named for `Wrap`.
        """
        self.backend, self._load = backend, load
        self.model = model = manifest.language_model
        self.dtype: np.dtype[Any] = DTYPES[manifest.precision]
        self.segments = manifest.segments
        widths = {tensor.name: tensor.shape[-1] for tensor in manifest.graphs["vision"].outputs}
        self.visual_token_bytes = self.dtype.itemsize * (int(widths["tokens"]) + manifest.deepstack_width)
        """The bytes of the vision tower's output for one token."""
        self.several_images = manifest.max_images > 1
        self._both_ways = manifest.both_ways
        self.rotary = Rotary(model.rope_theta, model.head_dim, self.dtype, model.rope_sections, model.rope_factor)
        self._prefills = set[tuple[Any, ...]]()
        """The kinds of prefills that are complete."""
        self._plan_engines: dict[str, Engine] = {}
        self._loading = Lock()
        joins = backend.joins_segments and manifest.decodes
        loaded = count()
        total = 2 + bool(manifest.projector) + joins + len(self.segments) + len(manifest.policy_graphs)

        def counted(graph: str) -> str:
            progress("loading the engines", next(loaded), total, "engines")
            return graph

        self.vision = load(counted("vision"))
        self.projector = load(counted(manifest.projector)) if manifest.projector else None
        self.token_decoder = load_token_decoder(counted("tokens")) if joins else None
        """What computes a new token; None where `decoders` and `last` do."""
        # The last segment, the largest, loads first: a graph takes more memory while it loads than later.
        last_first = [load_decoder(counted(f"decoder_{segment}")) for segment in reversed(range(len(self.segments)))]
        self.decoders = last_first[::-1]
        self.last = load(counted(manifest.last_graph))
        """The engine after the decoder: `head`, or `expert` or `action_head` in a policy."""
        self.of_policy = {graph: load(counted(graph)) for graph in manifest.policy_graphs}
        """The engines of a policy besides `last`, by their graphs."""
        self._deepstack = manifest.deepstack_width
        self.deepstack_token = self.deepstack_zeros(1)

    @property
    def resumes(self) -> bool:
        """Whether several new rows may run after earlier ones, each of which sees the rows up to its own."""
        return self.backend.resumes and not self._both_ways

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
            for graph in [*filter(None, [plan.tower]), *plan.graphs] if plan else ():
                self.plan_engine(graph)


class Later:
    """An array that the host reads from the device when it first needs it.

    A read waits for all work that is enqueued. Backends whose calls return when they are done are read at once.
    """

    def __init__(self, backend: Backend, tensor: Tensor) -> None:
        self._backend, self._tensor = backend, tensor if backend.enqueues else None
        self._array = None if backend.enqueues else backend.numpy(tensor)
        self.shape: tuple[int, ...] = tensor.shape if self._array is None else self._array.shape

    @property
    def array(self) -> Array:
        """The values; called in the backend's `turn`."""
        if self._array is None:
            self._array, self._tensor = self._backend.numpy(self._tensor), None
        return self._array

    @property
    def unread(self) -> Tensor | None:
        """The tensor on the device, if the host has not read it."""
        return self._tensor

    @property
    def on_device(self) -> Tensor:
        """The tensor on the device; called in the backend's `turn`."""
        return self._backend.tensor(self.array) if self._tensor is None else self._tensor


class Scores(NamedTuple):
    """Norms and salience of the tower's tokens, for the host."""

    norms: Later
    """[G,N] fp32: the norm of each token in the vision tower."""
    salience: Later
    """[G,N] fp32: the attention each token receives in the vision tower."""
    merged: Later | None = None
    """[G,places] int64: the place of the token that stands for each place of the grid, where the tower merges tokens:
    N of all places stand for themselves. None without merging, where places are tokens."""
    damaged: Mapping[str, Later] = MappingProxyType({})
    """[1] fp32, by name: how many values of further features are not finite."""

    def with_check(self, backend: Backend, what: str, features: Tensor) -> Scores:
        """Return the same scores, whose `check` includes these `features`."""
        counted = self._replace(damaged={**self.damaged, what: Later(backend, backend.not_finite(features))})
        if not backend.enqueues:
            counted.check()
        return counted

    def check(self) -> None:
        """Wait for the tower; raises `NumericsError` if its features are not finite."""
        if not (np.isfinite(self.norms.array).all() and np.isfinite(self.salience.array).all()):
            raise _not_finite("norms or salience")
        for what, counted in self.damaged.items():
            if counted.array[0]:
                raise _not_finite(what)


@dataclass(frozen=True)
class EncodedPicture:
    """A picture as the LLM receives it: n0 kept tokens of each of G' groups of N' tokens."""

    embeddings: Tensor
    """[G',n0,d] float on the device, in the decoder's width."""
    kept: Array | Later
    """`kept_index`, on the host or to be read."""
    scores: Scores
    """Of all tokens of the picture."""
    deepstack: Tensor | None = None
    """[G',n0,E] float on the device: what the decoder's first layers add to each row, for models with DeepStack."""

    @cached_property
    def rows(self) -> int:
        """The number of rows, G'*n0."""
        return prod(self.kept.shape)

    @property
    def kept_index(self) -> Array:
        """[G',n0] int64: the token of each row, numbered within its group."""
        index = self.kept.array if isinstance(self.kept, Later) else self.kept
        if self.merged is None:
            return index
        return np.stack([np.unique(places)[own] for places, own in zip(self.merged, index, strict=True)])

    def index_on_device(self, backend: Backend) -> Tensor | None:
        """Return `kept_index` on the device, or None if the host knows it; called in the backend's `turn`."""
        kept, merged = self.kept, self.scores.merged
        if all(one.unread is None for one in (kept, merged) if isinstance(one, Later)):
            return None
        index = kept.on_device if isinstance(kept, Later) else backend.tensor(kept)
        if merged is None:
            return index
        from sinkprune.runtime.backends.small_graphs import PLACES_OF

        places = merged.on_device
        return backend.small(PLACES_OF, places.shape[1])({"merged": places, "kept": index})["places"]

    @property
    def norms(self) -> Array:
        """[G',N'] fp32: the norm of each token in the vision tower."""
        return self._of_places(self.scores.norms)

    @property
    def salience(self) -> Array:
        """[G',N'] fp32: the attention each token receives in the vision tower."""
        return self._of_places(self.scores.salience)

    @property
    def merged(self) -> Array | None:
        """[G',N'] int64: the token that each token was merged into in the tower, or its own number; None without
        merging. `norms` and `salience` of a token are those of the one it was merged into."""
        return None if self.scores.merged is None else self.scores.merged.array

    def _of_places(self, values: Later) -> Array:
        if self.merged is None:
            # Frames that the sanitizer treats as one are one group from here on.
            return values.array.reshape(self.kept.shape[0], -1)
        tokens = [np.unique(places, return_inverse=True)[1] for places in self.merged]
        return np.take_along_axis(values.array, np.stack(tokens), axis=1)

    def on_host(self) -> tuple[Array, Array, Array, Array | None]:
        """Return `kept_index`, `norms`, `salience` and `merged` as views that cannot be changed: a session gives the
        same arrays to later answers."""
        index, norms, salience = map(_read_only, (self.kept_index, self.norms, self.salience))
        return index, norms, salience, None if self.merged is None else _read_only(self.merged)

    @property
    def first_tokens(self) -> Array:
        """[G',1] int64: the first token of each group, numbered through all."""
        groups = self.kept.shape[0]
        tokens = prod((self.scores.merged or self.scores.norms).shape) // groups
        return tokens * np.arange(groups)[:, None]

    @property
    def source_tokens(self) -> Array:
        """[G'*n0] int64: the token of each row, numbered through all groups."""
        return (self.kept_index + self.first_tokens).ravel()


def _read_only(array: Array) -> Array:
    # Views that numpy broadcasts cannot be changed.
    return np.broadcast_to(array, array.shape)


@dataclass(frozen=True)
class TowerOutput:
    """The outputs of the vision tower for a picture of G groups of N tokens."""

    tokens: Tensor
    """[G,N,D] float on the device."""
    device_norms: Tensor
    """[G,N] fp32 on the device."""
    device_salience: Tensor
    scores: Scores
    deepstack: Tensor | None = None
    """[G,N,E] float on the device: what the decoder's first layers add to each token, for models with DeepStack."""
    device_merged: Tensor | None = None
    """`Scores.merged` on the device."""

    @classmethod
    def of(
        cls, backend: Backend, features: Mapping[str, Tensor], damaged: Mapping[str, Later] = MappingProxyType({})
    ) -> TowerOutput:
        """Return the outputs of the graph `vision`; `damaged` is that of `Scores`."""
        norms, salience, merged = features["norms"], features["salience"], features.get("merged")
        places = None if merged is None else Later(backend, merged)
        scores = Scores(Later(backend, norms), Later(backend, salience), places, damaged)
        return cls(features["tokens"], norms, salience, scores, features.get("deepstack"), merged)

    @property
    def shape(self) -> tuple[int, ...]:
        """G and N."""
        return self.scores.norms.shape

    @property
    def norms(self) -> Array:
        """[G,N] fp32 on the host."""
        return self.scores.norms.array

    @property
    def salience(self) -> Array:
        """[G,N] fp32 on the host."""
        return self.scores.salience.array


def run_tower(
    chain: Chain, inputs: Mapping[str, Array] | FrameInputs, clock: Stopwatch, plan: Plan | None = None
) -> TowerOutput:
    """Run the vision tower of `plan` on the `inputs` of the graph `vision`, or on frames.

    Raises `NumericsError` if tokens, norms or salience are not finite, before tokens are selected by them. Where
    calls are only enqueued and a projector follows, `Scores.check` is left to the end of the prefill.
    """
    backend = chain.backend
    if not isinstance(inputs, Mapping):
        with clock.measure("preprocess"):
            inputs = inputs.prepared(backend)
    vision = chain.plan_engine(plan.tower) if plan and plan.tower else chain.vision
    with clock.measure("vision"):
        given = {name: backend.tensor(one) if isinstance(one, np.ndarray) else one for name, one in inputs.items()}
        features = vision(given)
    tower = TowerOutput.of(backend, features)
    if not backend.enqueues:
        tower.scores.check()
    if chain.projector is None:
        # Layers after the norms may still overflow. With a projector, the norms are those of the tokens.
        tower = replace(tower, scores=tower.scores.with_check(backend, "tokens", tower.tokens))
    return tower


def encode(
    chain: Chain, plan: Plan | None, tower: TowerOutput, clock: Stopwatch, question: Tensor | None = None
) -> EncodedPicture:
    """Run the plan's sanitizer, if any, and the projector, if any, on the output of the `tower`.

    `question` [T,d] are its words as the decoder receives them, for sanitizers that read it.
    """
    tokens, deepstack, scores = tower.tokens, tower.deepstack, tower.scores
    kept: Array | Later = np.broadcast_to(np.arange(tower.shape[1]), tower.shape)
    if plan is not None and plan.sanitizer is not None:
        inputs = {"tokens": tokens, "norms": tower.device_norms, "salience": tower.device_salience}
        if deepstack is not None:
            inputs["deepstack"] = deepstack
        if question is not None:
            inputs |= {"question": question, "embeddings": _in_llm(chain, tokens, clock)}
        found = clock.timed("sanitizer", chain.plan_engine(plan.sanitizer), inputs)
        tokens, deepstack = found["kept_tokens"], found.get("kept_deepstack")
        kept = Later(chain.backend, found["kept_index"])
    if deepstack is not None:
        scores = scores.with_check(chain.backend, "DeepStack features", deepstack)
    return EncodedPicture(_in_llm(chain, tokens, clock), kept, scores, deepstack)


def _in_llm(chain: Chain, tokens: Tensor, clock: Stopwatch) -> Tensor:
    if chain.projector is None:
        return tokens
    return clock.timed("projector", chain.projector, {"tokens": tokens})["embeddings"]


def _not_finite(what: str) -> NumericsError:
    return NumericsError(
        f"the vision tower gave {what} that are not finite, so neither a selection nor an answer is reliable. If "
        "the bundle is fp16, its values may exceed that type; export it with --precision fp32. openvino-gpu "
        "computes in fp16 unless --compute is fp32. If neither is so, the checkpoint's weights or its image "
        "processor's settings are damaged."
    )
