"""The shapes a pipeline really sends to its engines, against the optimisation profiles they would be built with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from PIL import Image

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import Limits, OptimisationProfile
from sinkprune.engines.optimisation_profiles import optimisation_profiles
from sinkprune.runtime.backends import Engine
from sinkprune.runtime.backends.ort import OrtBackend
from sinkprune.runtime.clip import Clip
from sinkprune.runtime.pipeline import Pipeline

Shapes = dict[str, tuple[int, ...]]
NEW_TOKENS = 3


class Recorder:
    """An engine that notes the shapes it is called with."""

    def __init__(self, engine: Engine, calls: list[Shapes]) -> None:
        self._engine, self._calls = engine, calls

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        self._calls.append({name: tuple(tensor.shape()) for name, tensor in inputs.items()})
        return self._engine(inputs)


def shapes_outside_optimisation_profiles(
    bundle: Bundle, prompts: Sequence[Sequence[tuple[int, int] | Clip]]
) -> list[tuple[str, Shapes]]:
    """What no optimisation profile holds when prompts with images of those sizes, or clips, run at every budget.

    Every graph must be run.
    """
    graphs = {bundle.graph_path(graph): graph for graph in bundle.manifest.graphs}
    calls: dict[str, list[Shapes]] = {graph: [] for graph in graphs.values()}
    load = OrtBackend.load
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            OrtBackend, "load", lambda self, path, *rest: Recorder(load(self, path, *rest), calls[graphs[path]])
        )
        pipeline = Pipeline.load(bundle.path)
        for sizes in prompts:
            images = [size if isinstance(size, Clip) else Image.new("RGB", size, (90, 60, 30)) for size in sizes]
            for budget in ("none", *bundle.manifest.budgets):
                pipeline.generate(images, "What?", budget=budget, **options)
    assert all(calls.values()), "a graph was never run"
    limits = Limits(64, NEW_TOKENS, bundle.manifest.max_images)
    profiles = optimisation_profiles(bundle.manifest, limits)
    return [
        (graph, shapes)
        for graph, sent in calls.items()
        for shapes in sent
        if not any(_holds(profile, shapes) for profile in profiles[graph].values())
    ]


def _holds(profile: OptimisationProfile, shapes: Shapes) -> bool:
    """An engine is given more tensors than its graph takes."""
    return all(
        len(shapes[name]) == len(span.min)
        and all(low <= size <= high for low, size, high in zip(span.min, shapes[name], span.max, strict=True))
        for name, span in profile.items()
    )
