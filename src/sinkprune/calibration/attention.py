"""Which tokens the text attends to, layer by layer. No answer is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np

from sinkprune.calibration.evaluation.replies import Combination, TaskReport
from sinkprune.calibration.evaluation.statistics import Mean, PictureBootstrap
from sinkprune.calibration.norms import mark_largest, sink_tokens
from sinkprune.calibration.questions import Loaded, Sample, ask
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Backend, Engine, Tensor
from sinkprune.runtime.hooks import Observer
from sinkprune.runtime.steps.decoding import Kept, Prefill
from sinkprune.runtime.steps.prompt_rows import PromptRows


def _head_weights(query: Array, key: Array, text: Array) -> Iterator[Array]:
    """Yield each head's attention [L,K] in fp64: the softmax over all keys of the rows `text` [L].

    `query` [1,H,S,h] and `key` [1,Hkv,K,h] are of one layer, both after RoPE. If L is 0, the last row stands for the
    text, as in the text-guided stages (method.md section 2). No more than [L,K] is in memory.
    """
    text = text if len(text) else np.array([query.shape[2] - 1])
    repeats = query.shape[1] // key.shape[1]
    for head in range(query.shape[1]):
        queries, keys = query[0, head, text].astype(np.float64), key[0, head // repeats].astype(np.float64)
        logits = queries @ keys.T * query.shape[3] ** -0.5
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        yield weights / weights.sum(axis=1, keepdims=True)


def text_attention(query: Array, key: Array, visual: Array, text: Array) -> tuple[float, Array]:
    """Return the mean entropy in nats, and the mean [V], of the text's attention a_hi over the visual rows, in fp64.

    There is an a_hi of every head h and text row i, which adds up to 1: the softmax of the layer's scaled logits over
    visual keys only. This equals the visual part of the causal softmax divided by its sum, because text rows come
    after the last visual row and attend to all visual rows.

    `query` [1,H,S,h] and `key` [1,Hkv,S,h] are of one layer, both after RoPE.
    `visual` [V] and `text` [L] are rows of them, V at least 1. If L is 0, the last row stands for the text.
    """
    found = [(_entropy(own).mean(), own.mean(axis=0)) for own in _head_weights(query, key[:, :, visual], text)]
    entropies, means = zip(*found, strict=True)
    return float(np.mean(entropies)), np.mean(means, axis=0)


Figure = TypeVar("Figure")
"""`float` in the figures of one question, `Mean` in those over questions."""


@dataclass(frozen=True)
class LayerFigures(Generic[Figure]):
    """One prune layer, before it drops rows."""

    rows: float
    """V: visual rows that the layer ran on."""
    sink_share: Figure
    """The fraction of those rows that are sink tokens."""
    entropy: Figure
    """Nats: entropy of the text's attention over the V rows, mean over heads and text rows."""
    entropy_of_mean: Figure
    """Nats: entropy of the attention's mean over heads and text rows, which look at different places."""
    uniform: float
    """Nats: ln V, which neither entropy can exceed: fewer rows alone lower it."""
    sink_attention: Figure
    """The fraction of the text's attention on visual rows that falls on sink tokens."""


@dataclass(frozen=True)
class RunFigures(Generic[Figure]):
    """One method at one budget, or the unpruned engines."""

    rows: float
    """Visual rows in front of the LLM."""
    sink_share: Figure
    """The fraction of them that are sink tokens; the average of the sink tokens counts as one."""
    salience_alone: Figure
    """What `sink_share` would be if as many tokens of each group were chosen by their salience alone."""
    last_rows: float
    """Visual rows that the last decoder layer ran on."""
    last_sink_share: Figure
    """The fraction of those that are sink tokens."""
    layers: dict[str, LayerFigures[Figure]]
    """By prune layer (0-based): each after which the bundle's decoder is cut."""


Observation = RunFigures[float]
"""The figures of one question."""
RunMeans = RunFigures[Mean]
LayerMeans = LayerFigures[Mean]
"""The means over questions."""
_WITHOUT_INTERVAL = ("rows", "last_rows", "uniform")


@dataclass(frozen=True, kw_only=True)
class AttentionReport(TaskReport):
    """What `sinkprune-calibrate attention --json` writes."""

    outlier_per_mille: int
    """rho: sink tokens are so many per mille of each group's tokens, rounded up, those of largest norm."""
    none: RunMeans
    """The unpruned engines: all visual tokens, nothing sanitised."""
    methods: dict[str, dict[str, RunMeans]]
    """By method, then budget."""


def summarise(pictures: Sequence[str], observations: Sequence[Observation]) -> RunMeans:
    """Return the means over questions. `pictures` names the picture of each, for its share of the bootstrap."""
    averaged = PictureBootstrap(pictures)

    def means(figures: Sequence[Any]) -> dict[str, Any]:
        names = [field.name for field in fields(figures[0]) if field.name != "layers"]
        found = {name: averaged([getattr(one, name) for one in figures]) for name in names}
        return {name: value.mean if name in _WITHOUT_INTERVAL else value for name, value in found.items()}

    layers = {
        layer: LayerMeans(**means([seen.layers[layer] for seen in observations])) for layer in observations[0].layers
    }
    return RunMeans(layers=layers, **means(observations))


class AttentionObserver(Observer):
    """Keeps the tensors of the last request that `observe` needs. Pass `wrap` to `Pipeline.load`."""

    rows: PromptRows
    prefill: Prefill

    def __init__(self) -> None:
        self.queries_and_keys: dict[str, tuple[Array, Array]] = {}
        """Queries [1,H,S,h] and keys [1,Hkv,S,h] by the decoder's graph."""

    def wrap(self, graph: str, engine: Engine, backend: Backend) -> Engine:
        """Return a decoder segment that keeps its queries and keys, and any other engine unchanged."""

        def watched(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            outputs = engine(inputs)
            if "query" in outputs:
                # Buffers may serve the next request.
                query, key = (backend.numpy(outputs[name]).copy() for name in ("query", "key"))
                self.queries_and_keys[graph] = (query, key)
            return outputs

        return watched if graph.startswith("decoder_") else engine

    def laid_out(self, rows: PromptRows) -> None:
        self.rows = rows

    def prefilled(self, result: Prefill) -> None:
        self.prefill = result


def observe(loaded: Loaded, watch: AttentionObserver, item: Sample, combination: Combination) -> Observation:
    """Answer one question, or act once, with one method and budget, on what was loaded with `watch.wrap`.

    Raises what `ask` raises.
    """
    pictures, unpruned = ask(loaded, item, combination, watch), combination.budget == UNPRUNED
    is_sink = np.concatenate([_sink_rows(kept, unpruned=unpruned) for kept in pictures])
    # As many of the most salient tokens of each group as were kept.
    salient = [sink_tokens(kept.norms)[mark_largest(kept.salience, kept.index.shape[1])] for kept in pictures]
    layers, alive = {}, np.arange(watch.rows.length)
    for number, segment in enumerate(loaded.bundle.manifest.segments):
        visual = np.flatnonzero(np.isin(alive, watch.rows.on_host.visual))
        sinks = is_sink[np.searchsorted(watch.rows.on_host.visual, alive[visual])]
        layer, tensors = segment[-1], watch.queries_and_keys.get(f"decoder_{number}")
        if tensors is not None:
            entropy, mean = text_attention(*tensors, visual, np.flatnonzero(np.isin(alive, watch.rows.text)))
            layers[str(layer)] = LayerFigures(
                rows=len(visual),
                sink_share=float(sinks.mean()),
                entropy=entropy,
                entropy_of_mean=float(_entropy(mean)),
                uniform=float(np.log(len(visual))),
                sink_attention=float(mean[sinks].sum()),
            )
        if layer in watch.prefill.keep_index:
            alive = alive[loaded.backend.numpy(watch.prefill.keep_index[layer])]
    return Observation(
        rows=len(is_sink),
        sink_share=float(is_sink.mean()),
        salience_alone=float(np.concatenate(salient).mean()),
        last_rows=len(sinks),
        last_sink_share=float(sinks.mean()),
        layers=layers,
    )


def _sink_rows(kept: Kept, *, unpruned: bool) -> Array:
    """Return [V] bool: the rows in front of the LLM that are sink tokens. Their average counts as one."""
    source = kept.layout.unpruned_rows if unpruned else kept.tokens
    # Rows at the end of a line stand for no token.
    return np.where(source < 0, False, sink_tokens(kept.norms).ravel()[source])


def _entropy(shares: Array) -> Array:
    return -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=-1)
