"""What a request may be at most, and the shapes that follow for every input of every graph.

TensorRT compiles for a range of shapes, tuned for one usual shape within it: an optimisation profile. Here they are
derived from the bundle: from its budgets, its image size and its model's positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from statistics import median_low
from typing import NamedTuple

from sinkprune.contract.engines_manifest import Limits, Range
from sinkprune.contract.errors import BundleError, UsageError
from sinkprune.contract.manifest import GraphSpec, Manifest
from sinkprune.contract.plans import Plan
from sinkprune.runtime.families import Family, load_family

_USUAL_PROMPT = 64
_MOST_PROMPT = 512
_MOST_NEW_TOKENS = 512


class Span(NamedTuple):
    """The smallest, usual and largest value of one dynamic dimension."""

    min: int
    opt: int
    max: int


# Not (1, 1, 1): for a fixed length TensorRT-RTX 1.7 lays the weights out anew, and the plan holds them twice
# (measured with 168 MB of weights: a plan of 340 MB; like this, of 173 MB).
_ONE_TOKEN = Span(1, 1, 2)


def resolve_limits(
    manifest: Manifest, *, prompt_tokens: int | None, new_tokens: int | None, images: int | None
) -> Limits:
    """The limits asked for; what is None is at most 512 tokens, or what the model has room for, and one image.

    Raises `UsageError` for what is not positive, exceeds the model's positions, or needs another bundle.
    """
    images = 1 if images is None else images
    for value, flag in ((prompt_tokens, "--max-prompt"), (new_tokens, "--max-new-tokens"), (images, "--max-images")):
        if value is not None and value < 1:
            raise UsageError(f"{flag} is {value}, expected at least 1.")
    if images > manifest.max_images:
        raise UsageError(
            f"--max-images is {images}, and this bundle was exported for up to {manifest.max_images} in a prompt. "
            f"Ask for no more, or export it again with sinkprune-export --max-images {images}."
        )
    visual = load_family(manifest).most_unpruned_rows(manifest.most_visual_tokens) * images
    positions = manifest.language_model.max_positions
    room = positions - visual
    if prompt_tokens is None:
        prompt_tokens = max(1, min(_MOST_PROMPT, room - new_tokens if new_tokens else room // 2))
    if new_tokens is None:
        new_tokens = max(1, min(_MOST_NEW_TOKENS, room - prompt_tokens))
    if prompt_tokens + new_tokens > room:
        raise UsageError(
            f"{prompt_tokens} tokens of prompt (--max-prompt), {visual} visual tokens and {new_tokens} new tokens "
            f"(--max-new-tokens) exceed the model's {positions} positions. Prompt and new tokens may be "
            f"{max(room, 0)} together."
        )
    return Limits(prompt_tokens, new_tokens, images)


def profiles(manifest: Manifest, limits: Limits, graph: str) -> dict[str, dict[str, Range]]:
    """The optimisation profiles of `graph`: its inputs' ranges, by profile.

    Decoder segments and head have two, `prefill` and `decode`, in one engine; every other graph has `prefill` only.
    But where images have larger groups than clips, and clips more of them, a graph that is given groups has `clip`
    and `image` instead: many groups of an image's size never come, and TensorRT could not rank them.
    Raises `BundleError` for a dynamic dimension that the graph contract does not know.
    """
    spec, family = manifest.graphs[graph], load_family(manifest)
    pictures = family.pictures(manifest.most_visual_tokens)

    def tokens(picture: tuple[int, int]) -> tuple[int, int]:
        return max(_visual_counts(manifest, family, graph, *picture)), prod(picture)

    if len(pictures) == 1 or not any("G" in tensor.shape for tensor in spec.inputs):
        pictures = {"prefill": max(pictures.values(), key=tokens)}
    spans = {name: _spans(manifest, family, limits, graph, *picture) for name, picture in pictures.items()}
    if graph == "head" or graph.startswith("decoder_"):
        rows = spans["prefill"]["S"]
        past = Span(1, rows.opt + limits.new_tokens // 2, rows.max + limits.new_tokens - 1)
        spans["decode"] = {**spans["prefill"], "S": _ONE_TOKEN, "P": past}
    return {name: _ranges(graph, spec, sizes) for name, sizes in spans.items()}


def _spans(manifest: Manifest, family: Family, limits: Limits, graph: str, n: int, groups: int) -> dict[str, Span]:
    """Every dynamic dimension, for pictures of up to `groups` groups of `n` tokens."""
    visual = _visual_counts(manifest, family, graph, n, groups)
    usual_prompt = min(_USUAL_PROMPT, limits.prompt_tokens)
    most = limits.images * max(visual)
    fewest = 1 if manifest.any_resolution or groups > 1 else min(visual)
    rows = Span(1, median_low(visual) + usual_prompt, most + limits.prompt_tokens)
    spans = {
        "G": Span(1, groups, groups),
        "N": Span(1, n, n),
        "n": Span(fewest, median_low(visual), max(visual)),
        "S": rows,
        "P": Span(0, 0, 0),
        "T": rows,
        "V": Span(fewest, median_low(visual), most),
        "V2": Span(1, median_low(visual), most),
        "L": Span(0, usual_prompt, limits.prompt_tokens),
    }
    if graph == "vision":
        spans |= {name: Span(*span) for name, span in family.vision_sizes(n, groups).items()}
    return spans


def _visual_counts(manifest: Manifest, family: Family, graph: str, n: int, groups: int) -> list[int]:
    """How many visual tokens of one image `graph` may be given: by each plan, and unpruned where that happens.

    Where images differ in theirs, those of one of `groups` groups of `n`. The projector is given those of one group.
    """
    named = ((method, budget) for method, budgets in manifest.plans.items() for budget in budgets)
    plans = [plan for plan in (manifest.plan_for(method, budget, n, groups) for method, budget in named) if plan]
    unpruned = family.most_unpruned_rows(manifest.most_visual_tokens)
    for plan in plans:
        for layer, select in plan.select_after.items():
            if select == graph:
                return [_visual_before(plan, groups, n, int(layer))]
    if graph == "projector":
        return sorted({n, *(plan.counts.kept if plan.sanitizer else n for plan in plans)})
    if graph.startswith("decoder_"):
        first = manifest.segments[int(graph.removeprefix("decoder_"))].start
        return sorted({unpruned, *(_visual_before(plan, groups, n, first) for plan in plans)})
    if graph == "head":
        last = manifest.language_model.num_layers
        return sorted({unpruned, *(_visual_before(plan, groups, n, last) for plan in plans)})
    return [n]


def _visual_before(plan: Plan, groups: int, n: int, layer: int) -> int:
    """The visual tokens of one image that reach `layer`, or the select behind it, of `groups` groups of `n`."""
    visible = plan.kept if plan.sanitizer else groups * n
    for pruned_after, kept in zip(plan.select_after, plan.counts.stages, strict=True):
        if int(pruned_after) < layer:
            visible = min(visible, kept)
    return visible


def _ranges(graph: str, spec: GraphSpec, spans: Mapping[str, Span]) -> dict[str, Range]:
    ranges = {}
    for tensor in spec.inputs:
        unknown = [size for size in tensor.shape if isinstance(size, str) and size not in spans]
        if unknown:
            raise BundleError(
                f"graph '{graph}': input '{tensor.name}' has the dynamic dimension '{unknown[0]}', expected one of "
                f"{', '.join(spans)}. Export the bundle again."
            )
        ranges[tensor.name] = Range(*(_shape(tensor.shape, spans, which) for which in range(3)))
    return ranges


def _shape(shape: Sequence[int | str], spans: Mapping[str, Span], which: int) -> tuple[int, ...]:
    return tuple(spans[size][which] if isinstance(size, str) else size for size in shape)
