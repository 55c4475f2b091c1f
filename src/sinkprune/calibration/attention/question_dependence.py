"""Chooses the attention heads that look where the question asks, from a user's pictures and questions.

No answer is needed. A head that the question guides looks elsewhere for another question about the same picture. A
head that looks at salient tokens, at sink tokens or at fixed places does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from sinkprune.calibration.asking import Loaded, Sample, ask
from sinkprune.calibration.attention.received_attention import received_by_head
from sinkprune.calibration.attention.watching import AttentionObserver
from sinkprune.calibration.evaluation.report import BASELINE
from sinkprune.contract.budgets import prune_layers
from sinkprune.contract.errors import BundleError, TaskError
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import Array
from sinkprune.export.pruning.chosen_heads import HEADS_VERSION, ChosenHeads, LayerHeads
from sinkprune.runtime.profiling.profile import model_name

_SHARE_OF_LARGEST = 0.5
"""A layer's heads are chosen if their dependence is at least this share of the layer's largest."""
_SHARE_OVER_LAYERS = 0.1
"""And at least this share of the largest of all layers: a layer in which no head reads the question gets no stage."""


def check_prune_layers(manifest: Manifest) -> None:
    """Raise `BundleError` for a bundle whose graphs do not give the queries and keys of every prune layer."""
    wanted = prune_layers(manifest.language_model.num_layers)
    if not {*wanted} <= {*manifest.cut_after}:
        raise BundleError(
            f"--heads chooses heads of layers {', '.join(map(str, wanted))}, and this bundle is cut after layers "
            f"{', '.join(map(str, manifest.cut_after)) or 'none'}. Export it with --methods sinkpruner."
        )


def questions_by_picture(items: Sequence[Sample]) -> list[list[Sample]]:
    """Return the different questions about each picture, at least two.

    A picture with one question also has the next other question of the file. Raises `TaskError` if all are the same.
    """
    if len({item.prompt for item in items}) < 2:
        raise TaskError(
            "all questions are the same, expected at least two different ones: --heads compares where heads look for "
            "each. Add questions to --data, or raise --limit."
        )
    asked: dict[str, dict[str, Sample]] = {}
    for item in items:
        asked.setdefault(item.picture, {}).setdefault(item.prompt, item)
    for number, item in enumerate(items):
        own = asked[item.picture]
        if len(own) < 2:
            later = [*items[number + 1 :], *items[:number]]
            other = next(one for one in later if one.prompt not in own)
            own[other.prompt] = item.asked_as(other)  # type: ignore[arg-type]
    return [list(own.values()) for own in asked.values()]


def choose_heads(
    loaded: Loaded, watch: AttentionObserver, groups: Sequence[Sequence[Sample]], count: Callable[[], None]
) -> ChosenHeads:
    """Return the heads of each prune layer, by the groups of `questions_by_picture`.

    Runs each question or instruction on the unpruned engines of what was loaded with `watch.wrap`. `count` is called
    for each. Raises what `ask` raises.
    """
    manifest = loaded.bundle.manifest
    wanted = {str(layer) for layer in prune_layers(manifest.language_model.num_layers)}
    total: dict[str, Array] = {}
    for group in groups:
        looks: dict[str, list[Array]] = {}
        for item in group:
            ask(loaded, item, BASELINE, watch)
            for layer, attention in _attention(manifest, watch):
                if layer in wanted:
                    looks.setdefault(layer, []).append(attention)
            count()
        for layer, own in looks.items():
            total[layer] = total.get(layer, np.zeros(1)) + question_dependence(np.stack(own))
    return ChosenHeads(HEADS_VERSION, model_name(manifest.checkpoint.source), _chosen(total, len(groups)))


def question_dependence(attention: Array) -> Array:
    """Return [H] in nats: the Jensen-Shannon divergence of each head's attention over the questions about a picture.

    `attention` [Q,H,V] is what visual rows receive of the text of each question; it is scaled to add up to 1. A head
    that looks at the same rows for every question has 0. The most is ln Q.
    """
    sums = attention.sum(axis=2, keepdims=True)
    # A head whose attention underflows looks at every row alike.
    shares = np.where(sums > 0, attention / np.where(sums > 0, sums, 1.0), 1 / attention.shape[2])
    divergence: Array = _entropy(shares.mean(axis=0)) - _entropy(shares).mean(axis=0)
    return np.maximum(divergence, 0.0)


def _entropy(shares: Array) -> Array:
    """Return the entropy of distributions along the last axis, in nats."""
    return -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=-1)


def _attention(manifest: Manifest, watch: AttentionObserver) -> Iterator[tuple[str, Array]]:
    """Yield each layer before a cut, and the attention [H,V] that its visual rows receive from the text."""
    for number, layer in enumerate(manifest.cut_after):
        query, key = (tensor.astype(np.float64) for tensor in watch.queries_and_keys[f"decoder_{number}"])
        yield str(layer), received_by_head(query, key, watch.rows)


def _chosen(total: Mapping[str, Array], pictures: int) -> dict[str, LayerHeads]:
    """Return each layer's heads whose dependence is large in the layer and not small beside that of other layers."""
    found = {}
    least = _SHARE_OVER_LAYERS * max(dependence.max() for dependence in total.values())
    for layer, dependence in total.items():
        chosen = np.flatnonzero(dependence >= max(least, _SHARE_OF_LARGEST * dependence.max()))
        found[layer] = LayerHeads(tuple(chosen.tolist()), tuple((dependence / pictures).tolist()))
    return found
