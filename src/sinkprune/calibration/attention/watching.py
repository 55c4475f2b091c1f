"""Watches requests for what the attention report tells: which tokens are kept, and the queries and keys of prune
layers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sinkprune.calibration.attention.report import LayerObservation, Observation
from sinkprune.calibration.attention.text_attention import text_attention
from sinkprune.calibration.evaluation.report import Combination
from sinkprune.calibration.sink_tokens import largest, sink_tokens
from sinkprune.calibration.tasks import Item
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.errors import SinkpruneError
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Backend, Engine, Tensor
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.answer import Kept
from sinkprune.runtime.steps.decoding import Prefill
from sinkprune.runtime.steps.observer import Observer
from sinkprune.runtime.steps.prompt_rows import PromptRows


class Watch(Observer):
    """Keeps of a request what `observe` needs; `wrap` is for that of `Pipeline.load`."""

    rows: PromptRows
    prefill: Prefill

    def __init__(self) -> None:
        self.asked: dict[str, tuple[Array, Array]] = {}
        """Queries [1,H,S,h] and keys [1,Hkv,S,h] of the last request, by the decoder's graph that gave them."""

    def wrap(self, graph: str, engine: Engine, backend: Backend) -> Engine:
        """The engine of a decoder segment, whose queries and keys are kept; any other as it is."""

        def watched(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            outputs = engine(inputs)
            if "query" in outputs:
                # Buffers may serve the next request.
                self.asked[graph] = (backend.numpy(outputs["query"]).copy(), backend.numpy(outputs["key"]).copy())
            return outputs

        return watched if graph.startswith("decoder_") else engine

    def laid_out(self, rows: PromptRows) -> None:
        """Keeps which rows are visual and which ask."""
        self.rows = rows

    def prefilled(self, result: Prefill) -> None:
        """Keeps the rows that survived each stage."""
        self.prefill = result


def observe(pipeline: Pipeline, watch: Watch, item: Item, combination: Combination) -> Observation:
    """Ask one question with one method and budget, on a pipeline that was loaded with `watch.wrap`.

    Raises what `Pipeline.stream` raises, naming the question.
    """
    # The unpruned engines are the same whatever the method.
    unpruned = combination.budget == UNPRUNED
    method = next(iter(pipeline.bundle.manifest.plans)) if unpruned else combination.method
    try:
        answer = pipeline.generate(
            item.load_image(),
            item.question.prompt,
            method=method,
            budget=combination.budget,
            max_new_tokens=1,
            observer=watch,
        )
    except SinkpruneError as error:
        raise type(error)(f"question '{item.question.id}': {error}") from error
    kept = answer.kept
    is_sink = _sink_rows(kept, unpruned=unpruned)
    layers, alive = {}, np.arange(watch.rows.length)
    for number, segment in enumerate(pipeline.chain.segments):
        visual = np.flatnonzero(np.isin(alive, watch.rows.visual))
        sinks = is_sink[np.searchsorted(watch.rows.visual, alive[visual])]
        layer, asked = segment[-1], watch.asked.get(f"decoder_{number}")
        if asked is not None:
            seen = text_attention(*asked, visual, np.flatnonzero(np.isin(alive, watch.rows.text)))
            layers[layer] = LayerObservation(
                rows=len(visual),
                sink_share=float(sinks.mean()),
                entropy=seen.entropy,
                entropy_of_mean=seen.entropy_of_mean,
                uniform=seen.uniform,
                sink_attention=float(seen.mean[sinks].sum()),
            )
        if layer in watch.prefill.keep_index:
            alive = alive[pipeline.backend.numpy(watch.prefill.keep_index[layer])]
    return Observation(
        picture=item.picture,
        rows=len(is_sink),
        sink_share=float(is_sink.mean()),
        salience_alone=_salience_alone(kept),
        last_rows=len(sinks),
        last_sink_share=float(sinks.mean()),
        layers=layers,
    )


def _sink_rows(kept: Kept, *, unpruned: bool) -> Array:
    """[V] bool: which of the rows in front of the LLM are sink tokens. Their average is told as one of them."""
    groups, tokens = kept.norms.shape
    source = kept.layout.unpruned_rows if unpruned else (kept.index + tokens * np.arange(groups)[:, None]).ravel()
    # Rows at the end of a line stand for no token.
    marked: Array = np.where(source < 0, False, sink_tokens(kept.norms).ravel()[source])
    return marked


def _salience_alone(kept: Kept) -> float:
    """The share of sink tokens among as many tokens of each group, those of largest salience."""
    return float(sink_tokens(kept.norms)[largest(kept.salience, kept.index.shape[1])].mean())
