"""The evidence of the tokens of a task's pictures, and the thresholds that meet a budget's mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from sinkprune.calibration.evaluation.replies import generate_answer
from sinkprune.calibration.evaluation.report import Combination
from sinkprune.calibration.evidence.finder import NONE, counts_at, threshold_for
from sinkprune.calibration.evidence.report import FoundThresholds
from sinkprune.calibration.tasks import Item, items_by_picture
from sinkprune.contract.precision import Array
from sinkprune.contract.reports.report import TokenSpread
from sinkprune.runtime.backends import Backend, Engine, Tensor
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.answer import Answer


class EvidenceRecorder:
    """Keeps the latest evidence that each graph of a pipeline measured."""

    def __init__(self) -> None:
        self.latest: dict[str, Array] = {}
        """The output `evidence` by graph, flat."""

    def wrap(self, graph: str, engine: Engine, backend: Backend) -> Engine:
        """Return an engine that calls `engine` and keeps its evidence; a `sinkprune.runtime.pipeline.Wrap`."""

        def recorded(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            outputs = engine(inputs)
            if "evidence" in outputs:
                self.latest[graph] = backend.numpy(outputs["evidence"]).ravel().copy()
            return outputs

        return recorded


def find_thresholds(
    pipeline: Pipeline,
    recorder: EvidenceRecorder,
    items: Sequence[Item],
    pair: Combination,
    on_run: Callable[[], None],
) -> FoundThresholds:
    """Return the thresholds at which the mean over `items` of the visual tokens a layer is nearest to the aim.

    The threshold before the LLM meets its own aim, and that of the stage what is left of the mean of both. The plans
    of `pipeline` are those of its bundle; the found thresholds are set there. `recorder` wraps its engines. `on_run`
    is called before each question is asked. Raises what `Pipeline.generate` raises.
    """
    manifest = pipeline.bundle.manifest
    plan = manifest.plans[pair.method][pair.budget]
    if plan.evidence is None:
        raise ValueError(f"the counts of method '{pair.method}' do not vary")
    own, layers = plan.evidence, manifest.language_model.num_layers

    def ask(item: Item, *thresholds: float) -> Answer:
        found = replace(own, thresholds=thresholds[: len(own.graphs)])
        manifest.plans[pair.method][pair.budget] = replace(plan, evidence=found)
        return generate_answer(pipeline, item.load_image(), item.question, pair, max_new_tokens=1)

    # Before the LLM, evidence depends on the picture only.
    evidence, tokens = [], []
    for group in items_by_picture(items):
        answer = ask(group[0], NONE, NONE)
        evidence += [recorder.latest[own.graphs[0]]] * len(group)
        tokens += [answer.visual_tokens] * len(group)
    most = [int(np.isfinite(values).sum()) for values in evidence]
    before = threshold_for(sum(own.aims[0].of(count) - 1 for count in tokens), evidence, most)
    # The register is one more row.
    rows = [1 + count for count in counts_at(before, evidence, most)]
    thresholds: tuple[float, ...] = (before,)
    means = [float(count) for count in rows]
    aims = [float(own.aimed_mean(count, plan.cuts, layers)) for count in tokens]

    evidence = []
    for item in items:
        on_run()
        ask(item, before, NONE)
        evidence += [recorder.latest[graph] for graph in own.graphs[1:]]
    for cut in plan.cuts:
        full = cut + 1
        wanted = (sum(aims) * layers - sum(rows) * full) / (layers - full)
        after = threshold_for(wanted, evidence, rows)
        thresholds, left = (before, after), counts_at(after, evidence, rows)
        means = [(row * full + rest * (layers - full)) / layers for row, rest in zip(rows, left, strict=True)]
    manifest.plans[pair.method][pair.budget] = replace(plan, evidence=replace(own, thresholds=thresholds))
    return FoundThresholds(thresholds, sum(aims) / len(aims), sum(means) / len(means), TokenSpread.of(means))
