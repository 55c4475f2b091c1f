"""What the text attends to, against slow references."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sinkprune import Pipeline
from sinkprune.calibration.attention import AttentionObserver, observe, text_attention
from sinkprune.calibration.evaluation.replies import BASELINE, Combination
from sinkprune.calibration.tasks import Item
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.questions import Question
from sinkprune.runtime.backends import Backend, Engine
from sinkprune.runtime.media.picture_warnings import picture_facts
from support.references.masking import Sequence, masked_forward
from support.references.reference import largest
from support.references.steps import QUESTION, Watched, watched
from support.references.transformers_runs import attentions

Array = np.ndarray[Any, Any]
Bundles = Callable[..., Path]
# 64 tokens; five groups of 64; 56 and 120 tokens
CASES = {
    "gqa-112": ("retain-192", (200, 150)),
    "next-mistral": ("retain-320", (224, 200)),
    "qwen": ("prune-66.7", (224, 200)),
    "qwen2-vl": ("prune-77.8", (280, 336)),
}


def slow(weights: Array, visual: list[int], text: list[int]) -> tuple[float, Array]:
    """The mean entropy and the mean of the attention [H,S,S] of `text` rows on `visual` ones, row by row."""
    entropies, mean = [], np.zeros(len(visual))
    for head in weights.astype(np.float64):
        for row in text:
            on_visual = np.array([head[row, column] for column in visual])
            shares = on_visual / on_visual.sum()
            entropies.append(-sum(share * math.log(share) for share in shares if share > 0))
            mean += shares
    return sum(entropies) / len(entropies), mean / len(entropies)


def sinks_of(steps: Watched, source: list[int]) -> list[bool]:
    """Return which rows, by the token of each (-1: none), are among the 1 % of their group's largest norms."""
    norms = steps.answer.kept.norms
    count, sinks = norms.shape[1], set()
    for group, own in enumerate(norms):
        sinks |= {group * count + token for token in largest(own, -(-count // 100))}
    return [token in sinks for token in source]


def observed(bundle: Path, image: Image.Image, combination: Combination) -> Any:
    watch = AttentionObserver()
    pipeline = Pipeline.load(bundle, wrap=watch.wrap, check_sums=False)
    return observe(pipeline, watch, asked_about(image), combination)


def asked_about(image: Image.Image) -> Item:
    return Item(Question("1", "all", QUESTION, ("a cup",)), "a picture", image.copy, picture_facts(image))


def assert_layers(found: Any, expected: dict[int, tuple[Array, list[int], list[int], list[bool]]]) -> None:
    """Each prune layer's weights [H,S,S], visual rows, text rows, and which visual rows are sink tokens."""
    assert list(found.layers) == [str(layer) for layer in expected]
    for layer, (weights, visual, text, sinks) in expected.items():
        entropy, mean = slow(weights, visual, text)
        seen = found.layers[str(layer)]
        assert seen.rows == len(visual)
        assert seen.sink_share == pytest.approx(sum(sinks) / len(sinks))
        assert seen.entropy == pytest.approx(entropy, abs=2e-3)
        assert seen.entropy_of_mean == pytest.approx(-sum(p * math.log(p) for p in mean if p > 0), abs=2e-3)
        assert seen.uniform == pytest.approx(math.log(len(visual)))
        assert seen.sink_attention == pytest.approx(mean[sinks].sum(), abs=2e-3)


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_transformers_attends_to_without_what_was_dropped(
    name: str, bundle: Bundles, pipeline: Callable[..., Pipeline], model: Callable[[str], Any], photo: Image.Image
) -> None:
    pipe, (budget, size) = pipeline(name), CASES[name]
    image, manifest = photo.resize(size), read_bundle(bundle(name)).manifest
    for combination in (BASELINE, Combination("sinkpruner", budget)):
        pruned = combination != BASELINE
        steps = watched(pipe, image, budget=combination.budget, max_new_tokens=1)
        rows, kept = steps.rows, steps.answer.kept
        sequence = Sequence(
            pipe.backend.numpy(rows.hidden)[0],
            rows.on_host.visual.tolist(),
            rows.text.tolist(),
            rows.on_host.positions.rows if len(rows.on_host.positions.rows) > 1 else None,
            manifest.family,
        )
        with attentions(model(name)) as weights:
            masked = masked_forward(model(name), sequence, budget, kept.schedule.after if pruned else {})
        source = kept.layout.unpruned_rows
        if pruned:
            source = (kept.index + kept.norms.shape[1] * np.arange(len(kept.index))[:, None]).ravel()
        sinks = dict(zip(sequence.visual, sinks_of(steps, source.tolist()), strict=True))
        expected, alive = {}, list(range(rows.length))
        for layer in manifest.cut_after:
            visual = [row for row in alive if row in sinks]
            expected[layer] = (weights[layer], visual, sequence.text, [sinks[row] for row in visual])
            alive = masked.survivors.get(layer, alive)
        found = observed(bundle(name), image, combination)
        assert_layers(found, expected)
        assert (found.rows, found.sink_share) == (len(sinks), pytest.approx(sum(sinks.values()) / len(sinks)))
        left = [sinks[row] for row in alive if row in sinks]
        assert (found.last_rows, found.last_sink_share) == (len(left), pytest.approx(sum(left) / len(left)))
    # One row of each group: the average of its sink tokens.
    assert sum(sinks.values()) == len(kept.index) and len(sinks) < kept.norms.size
    count = kept.index.shape[1]
    groups = zip(kept.salience, kept.norms, strict=True)
    alone = [len({*largest(s, count)} & {*largest(n, -(-len(n) // 100))}) / count for s, n in groups]
    assert found.salience_alone == pytest.approx(np.mean(alone))


def test_a_row_at_the_end_of_a_line_is_no_sink_token(bundle: Callable[..., Path], photo: Image.Image) -> None:
    watch = AttentionObserver()

    def last_is_largest(graph: str, engine: Engine, backend: Backend) -> Engine:
        """Of every group the last token has the largest norm."""

        def changed(inputs: Mapping[str, Any]) -> dict[str, Any]:
            features = engine(inputs)
            norms = backend.numpy(features["norms"]).copy()
            norms[:, -1] = 2 * norms.max()
            return {**features, "norms": backend.tensor(norms)}

        return changed if graph == "vision" else watch.wrap(graph, engine, backend)

    pipe = Pipeline.load(bundle("next"), wrap=last_is_largest, check_sums=False)
    image = photo.resize((224, 224))
    found = observe(pipe, watch, asked_about(image), BASELINE)
    rows = pipe.family.layout(image).unpruned_rows
    assert (rows < 0).sum() == 16 and found.rows == 5 * 64 + 16
    assert found.sink_share == pytest.approx(5 / found.rows)


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(0, 4)), st.integers(0, 2**32 - 1)
)
@settings(max_examples=50, deadline=None)
def test_entropies_are_those_of_a_softmax_over_visual_keys(sizes: tuple[int, int, int, int], seed: int) -> None:
    groups, repeats, visual, text = sizes
    random, before = np.random.default_rng(seed), 2
    rows = before + visual + text
    query = random.normal(size=(1, groups * repeats, rows, 8)).astype(np.float32) * 3
    key = random.normal(size=(1, groups, rows, 8)).astype(np.float32) * 3
    seen = np.arange(before, before + visual)
    asking = np.arange(before + visual, rows)
    found, found_mean = text_attention(query, key, seen, asking)
    logits = np.einsum("hld,hvd->hlv", query[0].astype(np.float64), np.repeat(key[0], repeats, axis=0)) / 8**0.5
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    entropy, mean = slow(weights, seen.tolist(), asking.tolist() or [rows - 1])
    assert found == pytest.approx(entropy, abs=1e-6)
    np.testing.assert_allclose(found_mean, mean, atol=1e-9)
