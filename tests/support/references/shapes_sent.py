"""The shapes a pipeline really sends to its engines, against the optimisation profiles they would be built with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from sinkprune import Pipeline, Policy
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import Limits, OptimisationProfile
from sinkprune.engines.profiles import optimisation_profiles
from sinkprune.runtime.backends import Backend, Engine
from sinkprune.runtime.media.clip import Clip

Shapes = dict[str, tuple[int, ...]]
NEW_TOKENS = 3


class ShapesSent:
    """What `Pipeline.load` is to wrap ONNX Runtime's engines in: notes the shapes they are called with, by graph."""

    def __init__(self) -> None:
        self.by_graph: dict[str, list[Shapes]] = {}

    def __call__(self, graph: str, engine: Engine, backend: Backend) -> Engine:
        sent = self.by_graph.setdefault(graph, [])

        def call(inputs: Mapping[str, Any]) -> dict[str, Any]:
            sent.append({name: tuple(tensor.shape()) for name, tensor in inputs.items()})
            return engine(inputs)

        return call

    def outside_optimisation_profiles(self, bundle: Bundle, limits: Limits) -> list[tuple[str, Shapes]]:
        """What no optimisation profile holds of engines built with these limits. Every graph must have been run."""
        profiles = optimisation_profiles(bundle.manifest, limits)
        assert all(self.by_graph.get(graph) for graph in profiles), "a graph was never run"
        return [
            (graph, shapes)
            for graph, sent in self.by_graph.items()
            for shapes in sent
            if not any(_holds(profile, shapes) for profile in profiles[graph].values())
        ]


def shapes_outside_optimisation_profiles(
    bundle: Bundle, prompts: Sequence[Sequence[tuple[int, int] | Clip]]
) -> list[tuple[str, Shapes]]:
    """What no optimisation profile holds when prompts with images of those sizes, or clips, run by every plan."""
    shapes_sent, options = ShapesSent(), {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    pipeline = Pipeline.load(bundle, wrap=shapes_sent)
    for sizes in prompts:
        images = [size if isinstance(size, Clip) else Image.new("RGB", size, (90, 60, 30)) for size in sizes]
        for method, budget in _plans(bundle):
            pipeline.generate(images, "What?", method=method, budget=budget, **options)
    return shapes_sent.outside_optimisation_profiles(bundle, Limits(64, NEW_TOKENS, bundle.manifest.max_images))


def policy_shapes_outside_optimisation_profiles(
    bundle: Bundle, limits: Limits, chunks: Sequence[tuple[Sequence[Image.Image | None], str]]
) -> list[tuple[str, Shapes]]:
    """What no optimisation profile holds when a policy acts on these cameras and instructions by every plan."""
    shapes_sent = ShapesSent()
    policy = Policy.load(bundle, wrap=shapes_sent)
    state = policy.facts.state_mean or [0.0] * policy.facts.state_dim
    for cameras, instruction in chunks:
        for method, budget in _plans(bundle):
            policy.act(cameras, instruction, state, method=method, budget=budget, steps=min(2, policy.facts.steps))
    return shapes_sent.outside_optimisation_profiles(bundle, limits)


def _plans(bundle: Bundle) -> list[tuple[str, str]]:
    own = [(method, budget) for method, budgets in bundle.manifest.plans.items() for budget in budgets]
    return [("sinkpruner", "none"), *own]


def _holds(profile: OptimisationProfile, shapes: Shapes) -> bool:
    """An engine is given more tensors than its graph takes, and caches that grow, where others have one room."""
    return all(
        len(shapes[name]) == len(span.min)
        and all(
            (low <= size or name.startswith("past_")) and size <= high
            for low, size, high in zip(span.min, shapes[name], span.max, strict=True)
        )
        for name, span in profile.items()
    )
