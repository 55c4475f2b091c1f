"""Records the figures of the attention report from a request: kept tokens, and queries and keys of prune layers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sinkprune.calibration.asking import Loaded, Sample, ask
from sinkprune.calibration.attention.report import LayerFigures, Observation
from sinkprune.calibration.attention.text_attention import text_attention
from sinkprune.calibration.evaluation.report import Combination
from sinkprune.calibration.sink_tokens import mark_largest, sink_tokens
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Backend, Engine, Tensor
from sinkprune.runtime.steps.decoding import Prefill
from sinkprune.runtime.steps.kept import Kept
from sinkprune.runtime.steps.observer import Observer
from sinkprune.runtime.steps.prompt_rows import PromptRows


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
                arrays = [backend.numpy(outputs[name]).copy() for name in ("query", "key")]
                self.queries_and_keys[graph] = (arrays[0], arrays[1])
            return outputs

        return watched if graph.startswith("decoder_") else engine

    def laid_out(self, rows: PromptRows) -> None:
        """Keep the places of visual rows and of text rows."""
        self.rows = rows

    def prefilled(self, result: Prefill) -> None:
        """Keep the rows that survived each stage."""
        self.prefill = result


def observe(loaded: Loaded, watch: AttentionObserver, item: Sample, combination: Combination) -> Observation:
    """Answer one question, or act once, with one method and budget, on what was loaded with `watch.wrap`.

    Raises what `ask` raises.
    """
    pictures, unpruned = ask(loaded, item, combination, watch), combination.budget == UNPRUNED
    is_sink = np.concatenate([_sink_rows(kept, unpruned=unpruned) for kept in pictures])
    layers, alive = {}, np.arange(watch.rows.length)
    for number, segment in enumerate(loaded.bundle.manifest.segments):
        visual = np.flatnonzero(np.isin(alive, watch.rows.visual))
        sinks = is_sink[np.searchsorted(watch.rows.visual, alive[visual])]
        layer, tensors = segment[-1], watch.queries_and_keys.get(f"decoder_{number}")
        if tensors is not None:
            seen = text_attention(*tensors, visual, np.flatnonzero(np.isin(alive, watch.rows.text)))
            layers[str(layer)] = LayerFigures(
                rows=len(visual),
                sink_share=float(sinks.mean()),
                entropy=seen.entropy,
                entropy_of_mean=seen.entropy_of_mean,
                uniform=seen.uniform,
                sink_attention=float(seen.mean[sinks].sum()),
            )
        if layer in watch.prefill.keep_index:
            alive = alive[loaded.backend.numpy(watch.prefill.keep_index[layer])]
    return Observation(
        rows=len(is_sink),
        sink_share=float(is_sink.mean()),
        salience_alone=float(np.concatenate([_salience_alone(kept) for kept in pictures]).mean()),
        last_rows=len(sinks),
        last_sink_share=float(sinks.mean()),
        layers=layers,
    )


def _sink_rows(kept: Kept, *, unpruned: bool) -> Array:
    """Return [V] bool: the rows in front of the LLM that are sink tokens. Their average counts as one."""
    source = kept.layout.unpruned_rows if unpruned else kept.tokens
    # Rows at the end of a line stand for no token.
    return np.where(source < 0, False, sink_tokens(kept.norms).ravel()[source])


def _salience_alone(kept: Kept) -> Array:
    """Return which of the most salient tokens, as many of each group as were kept, are sink tokens."""
    return sink_tokens(kept.norms)[mark_largest(kept.salience, kept.index.shape[1])]
