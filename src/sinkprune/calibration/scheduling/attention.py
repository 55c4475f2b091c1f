"""The attention that text pays to visual tokens in the unpruned model, and the share of it that budgets drop."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from sinkprune.calibration.attention import received_attention
from sinkprune.calibration.scheduling.search import TRIAL, PlanSpace
from sinkprune.contract.budgets import Share
from sinkprune.contract.errors import NumericsError
from sinkprune.contract.manifest import decoder_segments
from sinkprune.contract.precision import Array
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.chain import encode, run_tower
from sinkprune.runtime.steps.prompt_rows import PromptRows, lay_out


class PictureAttention(NamedTuple):
    """The measured attention to a picture of T visual tokens."""

    received: Array
    """[C,T]: the attention that each token receives from the text after the picture, in the layer before each cut.

    Means over heads and rows, like the scores of the method's stages.
    """
    kept: list[Array]
    """The tokens that each sanitizer keeps; the token of largest norm stands for the sink."""


def measure_attention(
    pipeline: Pipeline, image: Image.Image, question: str, sanitizers: Sequence[str]
) -> PictureAttention:
    """Run the unpruned model on a picture and a question, and the sanitizers of the trial plans of these names.

    Raises what a request raises.
    """
    manifest, chain, backend = pipeline.bundle.manifest, pipeline.chain, pipeline.backend
    clock = Stopwatch(backend)
    layout, tower = pipeline.family.layout(image), run_tower(chain, pipeline.family.inputs(image), clock)
    plans = [manifest.plans[TRIAL][name] for name in sanitizers]
    kept = [encode(chain, plan, tower, clock).source_tokens for plan in plans]
    texts = pipeline.prompts.encode(["", question], [layout.texts]).texts
    encoded, between = encode(chain, None, tower, clock), pipeline.family.between_rows
    rows = lay_out(backend, pipeline.embedding, between, texts, [layout], [encoded], pruned=False)
    # Rows at the end of a line have no token.
    source, received = layout.unpruned_rows, []
    for attention in _received(pipeline, rows):
        tokens = np.zeros(layout.all_tokens)
        np.add.at(tokens, source[source >= 0], attention[source >= 0])
        received.append(tokens)
    if not np.isfinite(received).all() or not np.sum(received, axis=1).all():
        raise NumericsError(
            "the text's attention to the picture is zero or not finite, so it cannot choose a budget."
        )
    return PictureAttention(np.stack(received), kept)


def _received(pipeline: Pipeline, rows: PromptRows) -> list[Array]:
    """Return [V] for each cut: the attention that visual rows receive."""
    chain, backend = pipeline.chain, pipeline.backend
    cos, sin = (backend.tensor(table) for table in chain.rotary.tables(rows.positions.rows))
    hidden, added, found = rows.hidden, rows.deepstack_inputs, []
    for decoder in chain.decoders[:-1]:
        outputs = decoder({"hidden": hidden, "cos": cos, "sin": sin, **added}, decoder.new_cache())
        # DeepStack's rows are inputs of the first segment only.
        hidden, added = outputs["hidden_out"], {}
        found.append(received_attention(backend, outputs, rows))
    return found


def dropped_attention(
    attended: Sequence[PictureAttention], sizes: Sequence[Share], selects: Sequence[int], seen: Sequence[int]
) -> tuple[Array, Array]:
    """Return `lost_before` [A,S] and `lost_after` [A,C,S,M] of `PlanSpace`: dropped attention, mean over pictures.

    `selects` [C] are the cuts whose attention ranks the tokens of the stage after each segment. `seen` [S] are the
    cuts whose attention stands for each segment: its own, and for the last segment the one before. Both are numbers
    of measured cuts, possibly repeated.
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
                # A stage breaks ties in favour of the earlier token.
                ranked = kept[np.argsort(-share[cut, kept], kind="stable")]
                left = np.cumsum(share[seen][:, ranked], axis=1)
                after[number, place] += 1 - left[:, np.minimum(counts, len(ranked)) - 1]
    return before / len(attended), after / len(attended)


class Measurements(NamedTuple):
    """The attention to all pictures, and the sanitizers and sizes to choose from."""

    attended: Sequence[PictureAttention]
    measured: Sequence[int]
    """The layers (0-based, ascending) whose attention is known: those after which the bundle is cut."""
    kept: Sequence[int]
    """Rows that each sanitizer keeps of the picture that prices are for."""
    sizes: Sequence[Share]
    tokens: int
    """Visual tokens of that picture."""


def plan_space(measurements: Measurements, cut_after: Sequence[int], num_layers: int) -> PlanSpace:
    """Return the plans of a decoder of `num_layers` that is cut after the layers `cut_after`.

    For a layer whose attention is unknown, a stage uses the nearest known layer before it, and a segment the nearest
    known layer after it.
    """
    last = len(measurements.measured) - 1
    segments = decoder_segments(cut_after, num_layers)
    selects = [max(0, bisect_right(measurements.measured, cut) - 1) for cut in cut_after]
    seen = [min(last, bisect_left(measurements.measured, layers[-1])) for layers in segments]
    before, after = dropped_attention(measurements.attended, measurements.sizes, selects, seen)
    rows = np.array([size.of(measurements.tokens) for size in measurements.sizes])
    return PlanSpace(tuple(map(len, segments)), np.array(measurements.kept), rows, before, after)
