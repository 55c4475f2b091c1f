"""The evidence of the tokens of a task's pictures, and the thresholds that meet a budget's mean."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from sinkprune.calibration.asking import Loaded, Sample, ask
from sinkprune.calibration.evaluation.report import Combination
from sinkprune.calibration.evidence.report import FoundThresholds
from sinkprune.calibration.tasks import items_by_picture
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.plans import Evidence, exceeding
from sinkprune.contract.precision import Array
from sinkprune.contract.reports.report import TokenSpread
from sinkprune.runtime.backends import Backend, Engine, Tensor

EVERY, NONE = -1.0, 3.4e38
"""Thresholds that every token passes, and none."""


class EvidenceRecorder:
    """Keeps the evidence that each graph measured in the latest request."""

    def __init__(self) -> None:
        self.latest: dict[str, list[Array]] = {}
        """The outputs `evidence` by graph, flat: one of each call. A policy measures each camera before the LLM."""

    def wrap(self, graph: str, engine: Engine, backend: Backend) -> Engine:
        """Return an engine that calls `engine` and keeps its evidence; a `sinkprune.runtime.pipeline.Wrap`."""

        def recorded(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            outputs = engine(inputs)
            if "evidence" in outputs:
                self.latest.setdefault(graph, []).append(backend.numpy(outputs["evidence"]).ravel().copy())
            return outputs

        return recorded


def find_thresholds(
    loaded: Loaded,
    recorder: EvidenceRecorder,
    items: Sequence[Sample],
    pair: Combination,
    on_run: Callable[[], None],
) -> FoundThresholds:
    """Return the thresholds at which the mean over `items` of the visual tokens a layer is nearest to the aim.

    The threshold before the LLM meets its own aim, and that of the stage what is left of the mean of both. The plans
    of `loaded` are those of its bundle; the found thresholds are set there. `recorder` wraps its engines. `on_run`
    is called before each question is asked. Raises what `ask` raises.
    """
    manifest = loaded.bundle.manifest
    plan, own = manifest.plans[pair.method][pair.budget], _evidence(manifest, pair)
    layers = manifest.language_model.num_layers

    def tokens_of(item: Sample, *thresholds: float) -> list[int]:
        """Return the visual tokens of each picture, at these thresholds."""
        set_thresholds(manifest, pair, *thresholds)
        recorder.latest.clear()
        return [kept.layout.all_tokens for kept in ask(loaded, item, pair)]

    # Before the LLM, evidence depends on the picture only. A policy's moment has a picture of each camera.
    evidence, tokens, starts = list[Array](), list[int](), list[int]()
    groups = items_by_picture(items)
    items = [item for group in groups for item in group]
    for group in groups:
        counts = tokens_of(group[0], NONE, NONE)
        for _ in group:
            starts.append(len(tokens))
            evidence += recorder.latest[own.graphs[0]]
            tokens += counts
    most = [int(np.isfinite(values).sum()) for values in evidence]
    before = threshold_for(sum(own.aims[0].of(count) - 1 for count in tokens), evidence, most)
    # The register is one more row.
    rows = [1 + count for count in counts_at(before, evidence, most)]
    thresholds: tuple[float, ...] = (before,)
    means = [float(count) for count in rows]
    aims = [float(own.aimed_mean(count, plan.cuts, layers)) for count in tokens]

    evidence = []
    for item, start, end in zip(items, starts, [*starts[1:], len(tokens)], strict=True):
        on_run()
        tokens_of(item, before, NONE)
        # The stage measures the rows of all pictures at once.
        after_each = np.cumsum(rows[start : end - 1])
        evidence += [part for graph in own.graphs[1:] for part in np.split(recorder.latest[graph][0], after_each)]
    for cut in plan.cuts:
        full = cut + 1
        wanted = (sum(aims) * layers - sum(rows) * full) / (layers - full)
        after = threshold_for(wanted, evidence, rows)
        thresholds, left = (before, after), counts_at(after, evidence, rows)
        means = [(row * full + rest * (layers - full)) / layers for row, rest in zip(rows, left, strict=True)]
    set_thresholds(manifest, pair, *thresholds)
    requests = np.add.reduceat(means, starts).tolist()
    return FoundThresholds(thresholds, sum(aims) / len(items), sum(means) / len(items), TokenSpread.of(requests))


def set_thresholds(manifest: Manifest, pair: Combination, *thresholds: float) -> None:
    """Set the first thresholds, as many as the plan has graphs of evidence, in the plan in memory."""
    own = _evidence(manifest, pair)
    found = replace(own, thresholds=thresholds[: len(own.graphs)])
    plans = manifest.plans[pair.method]
    plans[pair.budget] = replace(plans[pair.budget], evidence=found)


def _evidence(manifest: Manifest, pair: Combination) -> Evidence:
    evidence = manifest.plans[pair.method][pair.budget].evidence
    if evidence is None:
        raise ValueError(f"the counts of method '{pair.method}' do not vary")
    return evidence


def counts_at(threshold: float, evidence: Sequence[Array], most: Sequence[int]) -> list[int]:
    """Return how many tokens of each request pass `threshold`, by their `evidence`, at most as many as `most`."""
    return [exceeding(own, threshold, limit) for own, limit in zip(evidence, most, strict=True)]


def threshold_for(wanted: float, evidence: Sequence[Array], most: Sequence[int]) -> float:
    """Return the threshold at which the requests keep a number of tokens in all that is nearest to `wanted`.

    `evidence` are the values of each request, fp32. Thresholds are among these values, or `EVERY`. Of two that are
    equally near, the lower one keeps more.
    """
    values = np.concatenate([*evidence, np.array([EVERY], np.float32)])
    # From the threshold that the fewest tokens pass.
    candidates = np.unique(values[values >= EVERY])[::-1].tolist()

    def total(threshold: float) -> int:
        return sum(counts_at(threshold, evidence, most))

    at = min(bisect_left(candidates, wanted, key=total), len(candidates) - 1)
    near = candidates[max(0, at - 1) : at + 1][::-1]
    return float(min(near, key=lambda threshold: abs(total(threshold) - wanted)))
