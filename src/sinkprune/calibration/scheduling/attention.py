"""The attention that text pays to visual tokens in the unpruned model, and how much of it budgets would drop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from sinkprune.calibration.scheduling.trials import TRIAL
from sinkprune.contract.budgets import Share
from sinkprune.contract.errors import NumericsError
from sinkprune.contract.precision import Array
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.encoding import encode, run_tower
from sinkprune.runtime.steps.pictures import see
from sinkprune.runtime.steps.prompt_rows import PromptRows, lay_out


class Attended(NamedTuple):
    """A picture of T visual tokens that was asked about."""

    received: Array
    """[C,T]: the attention each token receives from the text behind the picture, in the layer before each cut; means
    over heads and rows, as the method's own stages score."""
    kept: list[Array]
    """Of each sanitizer: the tokens it keeps; a sink stands for its highest-norm member."""


def attend(pipeline: Pipeline, image: Image.Image, question: str, sanitizers: Sequence[str]) -> Attended:
    """Run the unpruned model on a picture and a question, and the plans on trial of these names as far as the LLM.

    Raises what a request raises.
    """
    manifest, chain, backend = pipeline.bundle.manifest, pipeline.chain, pipeline.backend
    clock = Stopwatch(backend)
    inputs, layout = see(image, image, pipeline.family, manifest)
    tower = run_tower(chain, inputs, clock)
    kept = []
    for name in sanitizers:
        kept.append(encode(chain, manifest.plans[TRIAL][name], tower, clock).source_tokens)
    texts = pipeline.prompts.encode(["", question], [layout.texts]).texts
    shown, between = [(layout, encode(chain, None, tower, clock))], pipeline.family.between_rows
    rows = lay_out(backend, pipeline.embedding, between, texts, shown, pruned=False)
    # A line's end stands for no token.
    source, received = layout.unpruned_rows, []
    for attention in _received(pipeline, rows):
        tokens = np.zeros(layout.all_tokens)
        np.add.at(tokens, source[source >= 0], attention[source >= 0])
        received.append(tokens)
    if not np.isfinite(received).all() or not np.sum(received, axis=1).all():
        raise NumericsError("the text pays the picture no attention that is finite, so nothing can be chosen by it.")
    return Attended(np.stack(received), kept)


def _received(pipeline: Pipeline, rows: PromptRows) -> list[Array]:
    """[V] behind each cut: the attention that visual rows receive."""
    chain, backend = pipeline.chain, pipeline.backend
    asking = rows.text if len(rows.text) else np.array([rows.length - 1])
    cos, sin = (backend.tensor(table) for table in chain.rotary.tables(rows.positions.rows))
    hidden, added, found = rows.hidden, rows.beside, []
    for decoder in chain.decoders[:-1]:
        outputs = decoder({"hidden": hidden, "cos": cos, "sin": sin, **added}, decoder.new_cache())
        # Of the first segment alone
        hidden, added = outputs["hidden_out"], {}
        query, key = (backend.numpy(outputs[name])[0].astype(np.float32) for name in ("query", "key"))
        found.append(_attention(query[:, asking], key, asking)[rows.visual])
    return found


def _attention(query: Array, key: Array, asking: Array) -> Array:
    """[T]: what keys [Hkv,T,h] receive of queries [H,R,h], which are the rows `asking` [R]: softmax over visible
    keys, mean over heads and rows."""
    heads, _, size = query.shape
    total = np.zeros(key.shape[1])
    hidden = np.arange(key.shape[1]) > asking[:, None]
    for head in range(heads):
        logits = query[head] @ key[head * len(key) // heads].T / np.sqrt(size)
        logits[hidden] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        total += (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)
    return total / heads


class Lost(NamedTuple):
    """Shares of attention, mean over pictures; see `sinkprune.calibration.scheduling.search.Space`."""

    before: Array
    """[A,S]."""
    after: Array
    """[A,C,S,M]."""


def lost(attended: Sequence[Attended], sizes: Sequence[Share], selects: Sequence[int], seen: Sequence[int]) -> Lost:
    """What sanitizers and stages drop.

    `selects` [C] are the numbers of the cuts whose attention a stage behind each segment goes by, `seen` [S] those of
    the cuts whose attention stands for each segment: its own, and for the last the one before it. Numbers may come
    again.
    """
    sanitizers = len(attended[0].kept)
    before = np.zeros((sanitizers, len(seen)))
    after = np.zeros((sanitizers, len(selects), len(seen), len(sizes)))
    for one in attended:
        share = one.received / one.received.sum(axis=1, keepdims=True)
        counts = np.array([size.of(share.shape[1]) for size in sizes])
        for number, kept in enumerate(one.kept):
            before[number] += 1 - share[seen][:, kept].sum(axis=1)
            for place, cut in enumerate(selects):
                # As a stage ranks them: ties go to the earlier.
                ranked = kept[np.argsort(-share[cut, kept], kind="stable")]
                left = np.cumsum(share[seen][:, ranked], axis=1)
                after[number, place] += 1 - left[:, np.minimum(counts, len(ranked)) - 1]
    return Lost(before / len(attended), after / len(attended))
