"""The largest request that engines are built for, and the optimisation profiles for it.

An optimisation profile is a range of shapes, tuned for one usual shape. The profiles follow from the bundle's budgets
and largest pictures, and from the limits of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from sinkprune.contract.budgets import BARLESS_TOWER, TOWER, Plan, is_tower
from sinkprune.contract.checks import WholeNumber, counted
from sinkprune.contract.engines_manifest import Limits, OptimisationProfile, OptimisationProfiles, Range
from sinkprune.contract.errors import BundleError, UsageError
from sinkprune.contract.manifest import GraphSpec, Manifest
from sinkprune.contract.schedule import PictureSchedule, VisualLayout, schedule
from sinkprune.runtime.backends.kv_cache import ROOM, room_for
from sinkprune.runtime.backends.small_graphs import LINE, GraphWriter, graphs_of
from sinkprune.runtime.families import load_family
from sinkprune.runtime.frames import FrameForm

# More than any model has. The positions of the bundle's model are checked too.
MAX_PROMPT = WholeNumber("--max-prompt", 1, 10**7)
MAX_NEW_TOKENS = WholeNumber("--max-new-tokens", 1, 10**7)
MAX_IMAGES = WholeNumber("--max-images", 1, 10**4)
_MOST_PROMPT = 512
# Instructions are short, and buffers have room for the longest.
_MOST_INSTRUCTION = 64
_MOST_INSTRUCTION_AND_STATE = 200
"""What pi0.5 was trained with, whose prompt has the state as text."""
_MOST_NEW_TOKENS = 512


def resolve_limits(
    manifest: Manifest, *, prompt_tokens: int | None, new_tokens: int | None, images: int | None
) -> Limits:
    """Return the limits: text tokens of a prompt, new tokens, and images of a prompt.

    None means one image, or 512 tokens, or fewer if the largest unpruned pictures leave fewer positions. A policy has
    all its cameras, as many new tokens as it decodes, and if None as many tokens of prompt as in its training; if the
    checkpoint does not say, 64, or 200 with the state in the prompt, and its rows that are no text. Raises
    `UsageError` for values out of range, beyond the model's positions, or beyond the bundle's images, and for limits
    that a policy does not have.
    """
    most_prompt = _MOST_PROMPT
    if manifest.policy is not None:
        if new_tokens is not None:
            raise UsageError(
                f"--max-new-tokens is {new_tokens}, and a robot policy generates no tokens. Leave the option out."
            )
        if images not in (None, manifest.max_images):
            again = f", or export the checkpoint again with sinkprune-export --max-images {images}"
            raise UsageError(
                f"--max-images is {images}, and this policy acts on {counted(manifest.max_images, 'camera')}. Leave "
                f"the option out{'' if manifest.policy.cameras else again}."
            )
        new_tokens, images = manifest.policy.new_tokens, manifest.max_images
        usual = _MOST_INSTRUCTION_AND_STATE if manifest.policy.state_in_prompt else _MOST_INSTRUCTION
        most_prompt = manifest.policy.most_prompt_tokens or usual + manifest.policy.own_rows
    images = images or 1
    if images > manifest.max_images:
        raise UsageError(
            f"--max-images is {images}, and this bundle was exported for up to {manifest.max_images} in a prompt. "
            f"Ask for no more, or export it again with sinkprune-export --max-images {images}."
        )
    visual = images * max(len(layout.unpruned_rows) for layout in load_family(manifest).largest().values())
    positions = manifest.language_model.max_positions
    room = positions - visual
    if prompt_tokens is None:
        prompt_tokens = max(1, min(most_prompt, room - new_tokens if new_tokens is not None else room // 2))
    if new_tokens is None:
        new_tokens = max(1, min(_MOST_NEW_TOKENS, room - prompt_tokens))
    if prompt_tokens + new_tokens > room:
        raise UsageError(
            f"{prompt_tokens} tokens of prompt (--max-prompt), {visual} visual tokens and {new_tokens} new tokens "
            f"(--max-new-tokens) exceed the model's {positions} positions. Prompt and new tokens may be "
            f"{max(room, 0)} together."
        )
    return Limits(prompt_tokens, new_tokens, images)


_USUAL_PROMPT = 64


class _Span(NamedTuple):
    """The smallest, usual and largest value of one dynamic dimension."""

    min: int
    opt: int
    max: int


# Not (1, 1, 1): for a fixed length, TensorRT-RTX 1.7 adds a copy of the weights in another layout. An engine with
# 168 MB of weights then had 340 MB, instead of 173 MB.
_ONE_TOKEN = _Span(1, 1, 2)


def optimisation_profiles(manifest: Manifest, limits: Limits) -> dict[str, OptimisationProfiles]:
    """Return the optimisation profiles of every graph of a bundle, by graph, then by profile.

    Decoder segments and the head have `prefill` and `decode` in one engine. Other graphs have `prefill` only, and so
    do all graphs of a policy that decodes no tokens. But if images have larger groups than clips, and clips have
    more groups, graphs with groups have `clip` and `image` instead: no request has many groups of an image's size,
    and TensorRT could not rank them.
    Raises `BundleError` for an unknown dynamic dimension.
    """
    family = load_family(manifest)
    plans = [(name, budget, plan) for name, own in manifest.plans.items() for budget, plan in own.items()]
    pictures = {}
    for kind, layout in family.largest().items():
        planned = tuple(
            (plan, schedule(manifest, name, budget, [layout]).pictures[0]) for name, budget, plan in plans
        )
        sizes = {name: _Span(*span) for name, span in family.vision_sizes(layout.tokens, layout.groups).items()}
        pictures[kind] = _Picture(manifest, layout, planned, sizes)
    return {graph: _of_graph(graph, manifest, limits, pictures) for graph in manifest.graphs}


class SmallGraphs(NamedTuple):
    """Graphs that the runtime writes itself."""

    graphs: Mapping[str, GraphWriter]
    """By their names."""
    sizes: Mapping[str, tuple[int, int, int]]
    """The smallest, usual and largest size of each dimension that differs."""

    @classmethod
    def of(cls, manifest: Manifest, limits: Limits) -> SmallGraphs:
        """Return those that a bundle needs: its family's graphs of frames, if any, and others."""
        family, decoder = load_family(manifest), manifest.language_model
        form, largest = family.frame_form(), [*family.largest().values()]
        usual, most = largest[0].tokens, max(layout.all_tokens for layout in largest)
        groups, prompt = max(layout.groups for layout in largest), min(_USUAL_PROMPT, limits.prompt_tokens)
        width = max(int(output.shape[-1]) for output in manifest.graphs[TOWER].outputs if len(output.shape) > 2)
        sizes = {
            "E": (1, usual * width, most * width),
            "G": (1, 1, groups),
            "P": (1, usual, most),
            "n": (1, usual, most),
            "p": (2, 2, max(2, groups)),
            "l": (1, -(-usual // LINE), -(-most // LINE)),
            "T": (1, prompt, limits.prompt_tokens),
            "V": (1, usual, limits.images * most),
            "S": (2, usual + prompt, limits.images * most + limits.prompt_tokens),
            "D": (decoder.head_dim // 2, decoder.hidden_size, max(decoder.hidden_size, manifest.deepstack_width)),
        }
        frames = cls(form.graphs, form.sizes) if form else cls({}, {})
        return cls({**frames.graphs, **graphs_of(manifest)}, {**frames.sizes, **sizes})


def small_profiles(small: FrameForm | SmallGraphs) -> dict[str, OptimisationProfiles]:
    """Return the optimisation profiles of graphs that the runtime writes itself: one for all usual sizes of each."""
    sizes = {name: _Span(*span) for name, span in small.sizes.items()}
    return {
        name: {"prefill": _ranges(name, graph.spec(f"{name}.onnx"), sizes)} for name, graph in small.graphs.items()
    }


@dataclass(frozen=True)
class _Picture:
    """The largest picture of a kind, with the tokens that each plan keeps of it."""

    manifest: Manifest
    layout: VisualLayout
    planned: tuple[tuple[Plan, PictureSchedule], ...]
    """Every plan of the bundle, with its schedule of the picture."""
    vision_sizes: dict[str, _Span]

    def visual_counts(self, graph: str) -> list[int]:
        """Return the possible numbers of visual tokens in the input of `graph`, ascending, by plan and unpruned.

        The projector gets the tokens of one group.
        """
        unpruned, n = len(self.layout.unpruned_rows), self.layout.tokens
        for plan, planned in self.planned:
            for cut, select in plan.select_after.items():
                if graph == select:
                    return [planned.reaching(int(cut))]
        if graph == "projector":
            kept = {planned.counts.kept for plan, planned in self.planned if plan.sanitizer and planned.counts}
            return sorted({n, *kept})
        if graph.startswith("decoder_"):
            layer = self.manifest.segments[int(graph.removeprefix("decoder_"))].start
        elif graph == self.manifest.last_graph:
            layer = self.manifest.language_model.num_layers
        else:
            return [n]
        return sorted({unpruned, *(planned.reaching(layer) for _, planned in self.planned)})

    def sizes(self, graph: str, limits: Limits) -> dict[str, _Span]:
        """Return every dynamic dimension of `graph`, for pictures up to this one."""
        groups, n, visual = self.layout.groups, self.layout.tokens, self.visual_counts(graph)
        # A policy's tower runs once, on all cameras.
        groups *= limits.images if self.manifest.policy and is_tower(graph) else 1
        usual_prompt = min(_USUAL_PROMPT, limits.prompt_tokens)
        usual, most = self._usual(visual, limits), limits.images * max(visual)
        barless = any(plan.tower == BARLESS_TOWER for plan, _ in self.planned)
        fewest = 1 if self.manifest.any_resolution or self.layout.groups > 1 or barless else min(visual)
        return {
            "G": _Span(1, groups, groups),
            "N": _Span(1, n, n),
            "n": _Span(fewest, median_low(visual), max(visual)),
            "S": self.rows(graph, limits),
            "C": _Span(0, 0, 0),
            "V": _Span(fewest, usual, most),
            "V2": _Span(1, usual, most),
            "L": _Span(0, usual_prompt, limits.prompt_tokens),
            "T": _Span(1, usual_prompt, limits.prompt_tokens),
            **self.vision_sizes,
            **self._rooms(limits),
        }

    def rows(self, graph: str, limits: Limits) -> _Span:
        """Return the rows that `graph`, of the decoder or a select, runs on: visual tokens and the prompt's text."""
        visual, prompt = self.visual_counts(graph), min(_USUAL_PROMPT, limits.prompt_tokens)
        return _Span(1, self._usual(visual, limits) + prompt, limits.images * max(visual) + limits.prompt_tokens)

    def _usual(self, visual: list[int], limits: Limits) -> int:
        """Return the usual number of visual rows, where one picture has one of the numbers `visual`.

        A prompt has one picture as a rule, and a policy's all cameras.
        """
        return median_low(visual) * (limits.images if self.manifest.policy else 1)

    def _rooms(self, limits: Limits) -> dict[str, _Span]:
        if not self.manifest.reads_caches:
            return {}
        rooms = {}
        for segment in range(len(self.manifest.segments)):
            rows = self.rows(f"decoder_{segment}", limits)
            usual, most = room_for(rows.opt), room_for(rows.max)
            # With caches in place, engines of decoder segments have one room, and the gate's recordings less.
            rooms[f"C{segment}"] = _Span(ROOM, most if self.manifest.cache == "in-place" else usual, most)
        return rooms


def _of_graph(
    graph: str, manifest: Manifest, limits: Limits, pictures: Mapping[str, _Picture]
) -> OptimisationProfiles:
    spec = manifest.graphs[graph]
    if len(pictures) == 1 or not any("G" in tensor.shape for tensor in spec.inputs):

        def tokens(picture: _Picture) -> tuple[int, int]:
            return max(picture.visual_counts(graph)), picture.layout.all_tokens

        pictures = {"prefill": max(pictures.values(), key=tokens)}
    sizes = {name: picture.sizes(graph, limits) for name, picture in pictures.items()}
    if graph == "head" or graph.startswith("decoder_"):
        rows = sizes["prefill"]["S"]
        usual = room_for(rows.opt + limits.new_tokens // 2)
        most = room_for(rows.max + max(limits.new_tokens, 1) - 1)
        if manifest.decodes:
            sizes["decode"] = {**sizes["prefill"], "S": _ONE_TOKEN, "C": _Span(ROOM, usual, most)}
        if manifest.cache == "in-place":
            # TensorRT takes one size of caches: that of the longest request.
            sizes = {name: {**spans, "C": _Span(most, most, most)} for name, spans in sizes.items()}
    return {name: _ranges(graph, spec, spans) for name, spans in sizes.items()}


def _ranges(graph: str, spec: GraphSpec, spans: Mapping[str, _Span]) -> OptimisationProfile:
    ranges = {}
    for tensor in spec.inputs:
        unknown = [size for size in tensor.shape if isinstance(size, str) and size not in spans]
        if unknown:
            raise BundleError(
                f"graph '{graph}': input '{tensor.name}' has the dynamic dimension '{unknown[0]}', expected one of "
                f"{', '.join(spans)}. Export the bundle again."
            )
        sizes = [spans[size] if isinstance(size, str) else _Span(size, size, size) for size in tensor.shape]
        ranges[tensor.name] = Range(*(tuple(span[which] for span in sizes) for which in range(3)))
    return ranges
