"""Budgets and the plans that they are made into.

A budget is a row of the table below, named on the command line, optionally followed by options:
``retain-64``, ``retain-64+compact``, ``retain-32+raster+visual-keys``. Every count is an exact share of the number
of visual tokens, in integers, so that a row measured on a 24x24 grid holds on any other (method.md section 3).

A family is a `FamilyRow`. It names two classes, which are imported with the family's first checkpoint or bundle
(docs/new-family.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from math import floor
from typing import Annotated, Any, Literal

from sinkprune.contract.checks import OPTIONAL, Bounds, Count, Size, unknown_name
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.registry import Registry

UNPRUNED = "none"
"""The budget of the unpruned engines, which every bundle has."""


@dataclass(frozen=True)
class Share:
    """`numerator` of every `denominator` tokens, rounded down, at least one unless the numerator is zero."""

    numerator: Count
    denominator: Size

    def of(self, tokens: int) -> int:
        """Return the share of `tokens` as a count."""
        if self.numerator == 0:
            return 0
        return max(1, tokens * self.numerator // self.denominator)


MOST_AT_ONCE = 16
"""The most diverse tokens of a round."""


def diversity_group(count: int, rounds: int) -> int:
    """Return b: how many of `count` diverse tokens a round chooses, without comparing them with each other.

    There are at least `rounds` rounds, or one for each token if there are fewer.
    """
    return max(1, min(MOST_AT_ONCE, count // rounds))


@dataclass(frozen=True)
class Counts:
    """A budget resolved for a number of visual tokens. All values are token counts."""

    outliers: Count
    """|H| of each group: the high-norm tokens that are removed."""
    sink: Count
    """1 if their mean takes the first place of each group's kept tokens, else 0."""
    reserve: Count
    """k_res: salient tokens kept of each group."""
    diverse: Count
    """k_div: diverse tokens kept of each group."""
    stages: tuple[Count, ...]
    """The K_s visual tokens, over all groups, that survive each text-guided stage."""

    @property
    def kept(self) -> int:
        """n0: the tokens that each group sends to the LLM."""
        return self.sink + self.reserve + self.diverse

    def of_groups(self, groups: int) -> Counts:
        """Return the counts of an image of `groups` groups, from those of one group."""
        return replace(self, stages=tuple(stage * groups for stage in self.stages))


@dataclass(frozen=True)
class Budget:
    """The shares that are kept, and the options of method.md sections 1 and 2. The defaults are the method itself."""

    reserve: Share
    """k_res: salient tokens of a group."""
    diverse: Share
    """k_div: diverse tokens of a group."""
    stages: tuple[Share, ...]
    """K_s: visual tokens of a picture that survive each text-guided stage."""
    outlier_per_mille: Annotated[int, Bounds(0, 1000)] = 10
    """rho: high-norm tokens of a group, rounded up."""
    diversity_rounds: Size = 8
    """The least rounds that choose diverse tokens; see `diversity_group`."""
    sanitizer: bool = True
    """Whether tokens are dropped before the LLM at all."""
    remove_outliers: bool = True
    aggregate: bool = True
    """Whether outliers are averaged into a sink token, or only dropped."""
    order: Literal["grouped", "raster"] = "grouped"
    scores_over: Literal["all_keys", "visual_keys"] = "all_keys"
    """The keys in a stage's softmax."""
    positions: Literal["keep", "compact"] = "keep"
    """Whether survivors of a stage keep their position ids or are renumbered."""
    frames: Literal["together", "apart"] = "together"
    """Whether the frames of a clip form one group or one group each."""
    tower: Literal["merging", "bars"] | None = field(default=None, metadata=OPTIONAL)
    """`merging` for a vision tower that merges similar tokens: the graphs keep as many as of all tokens. `bars` for
    one without the tokens on a picture's bars: the graphs keep the shares of the others."""
    queries: Literal["actions"] | None = field(default=None, metadata=OPTIONAL)
    """Whether stages read the attention of the rows that become actions, and not of the text."""

    def resolve(self, tokens: int, groups: int = 1) -> Counts:
        """Return the counts for `groups` groups of `tokens` visual tokens each (method.md section 1, "Clip")."""
        # Stages take shares of the whole image, not of the tokens that the sanitizer keeps.
        stages = tuple(stage.of(tokens * groups) for stage in self.stages)
        if not self.sanitizer:
            return Counts(outliers=0, sink=0, reserve=tokens, diverse=0, stages=stages)
        outliers = max(1, -(-tokens * self.outlier_per_mille // 1000)) if self.remove_outliers else 0
        low = tokens - outliers
        reserve = min(self.reserve.of(tokens), low)
        diverse = min(self.diverse.of(tokens), low - reserve)
        sink = int(self.remove_outliers and self.aggregate)
        return Counts(outliers, sink, reserve, diverse, stages)


def _row(tokens: int, reserve: int, diverse: int, *stages: int) -> Budget:
    """Return the budget of a table's row, whose counts are of `tokens` visual tokens."""
    return Budget(Share(reserve, tokens), Share(diverse, tokens), tuple(Share(stage, tokens) for stage in stages))


LLAVA_BUDGETS = {
    "retain-192": _row(576, 192, 192, 345, 195, 138),
    "retain-128": _row(576, 128, 128, 230, 130, 92),
    "retain-64": _row(576, 64, 64, 110, 74, 42),
    "retain-32": _row(576, 32, 32, 54, 36, 22),
}
"""Budgets of LLaVA-1.5: the paper's counts of 576 tokens."""

LLAVA_NEXT_BUDGETS = {"retain-320": _row(576, 64, 64, 110, 74, 42), "retain-160": _row(576, 32, 32, 54, 36, 22)}
"""Budgets of LLaVA-NeXT: rows of one tile; the names count the tokens of five tiles."""

QWEN_BUDGETS = {
    "prune-66.7": _row(1000, 450, 50, 400, 350, 250),
    "prune-77.8": _row(1000, 450, 50, 300, 200, 120),
    "prune-80": _row(1000, 400, 50, 300, 200, 120),
    "prune-88.9": _row(1000, 200, 50, 180, 110, 60),
}
"""Budgets of families whose images differ in their number of tokens or tiles, per mille."""

OPTIONS: dict[str, Callable[[Budget], Budget]] = {
    "raster": lambda budget: replace(budget, order="raster"),
    "drop-sink": lambda budget: replace(budget, aggregate=False),
    "keep-outliers": lambda budget: replace(budget, remove_outliers=False),
    "no-diversity": lambda budget: replace(budget, diverse=Share(0, 1)),
    "no-sanitizer": lambda budget: replace(budget, sanitizer=False),
    "visual-keys": lambda budget: replace(budget, scores_over="visual_keys"),
    "compact": lambda budget: replace(budget, positions="compact"),
    "per-frame": lambda budget: replace(budget, frames="apart"),
    "action-rows": lambda budget: replace(budget, queries="actions"),
    "tower": lambda budget: replace(budget, tower="merging"),
    "bars": lambda budget: replace(budget, tower="bars"),
}
"""The options of method.md sections 1 and 2, by their name after a budget's ``+`` (docs/budgets.md). `with_option`
adds those with a number or a name."""
_RHO = re.compile(r"rho-([1-9][0-9]?[0-9]?)")
FROM = "from-"
"""The start of the option that takes the sanitizer of another budget."""


def with_option(budget: Budget, name: str, others: Mapping[str, Budget]) -> Budget:
    """Return the budget with an option: one of `OPTIONS`, `rho-N` or `from-OTHER`.

    By `rho-N`, N of 1000 tokens are outliers. By `from-OTHER`, the sanitizer keeps what it keeps at another budget,
    one of `others`. Raises `BudgetError` for any other name.
    """
    if name in OPTIONS:
        made = OPTIONS[name](budget)
        if budget.tower not in (None, made.tower):
            raise BudgetError("options 'tower' and 'bars' are for a tower each. Leave one of them out.")
        return made
    other = others.get(name.removeprefix(FROM)) if name.startswith(FROM) else None
    if other is not None:
        return replace(budget, reserve=other.reserve, diverse=other.diverse)
    found = _RHO.fullmatch(name)
    if found is None:
        raise BudgetError(
            unknown_name(f"unknown option '{name}'", name, [*OPTIONS, "rho-N", "from-BUDGET"], "Known options")
            + f" rho-N: N per mille, from 1 to 999. from-BUDGET: the sanitizer of {', '.join(others)}."
        )
    return replace(budget, outlier_per_mille=int(found[1]))


def prune_layers(num_layers: int) -> tuple[int, ...]:
    """Return the 0-based decoder layers after which SinkPruner drops tokens: (2, 6, 15), scaled to `num_layers`.

    Raises `BudgetError` for models too shallow to prune three times.
    """
    return scaled_layers((2, 6, 15), num_layers)


def decoder_cuts(stages: Iterable[int], num_layers: int) -> tuple[int, ...]:
    """Return the 0-based layers after which a decoder is split: where `stages` prune, and after the last prune layer.

    The latter ends the first half: to load one graph of nearly all layers takes more memory.
    """
    return tuple(sorted({*stages, prune_layers(num_layers)[-1]}))


NOMINAL_TOKENS = 10_000
"""The visual tokens that shares are of where images differ in their number of tokens."""


def round_half_up(value: Fraction) -> int:
    """Return the integer nearest to `value`; of two, the larger."""
    return floor(value + Fraction(1, 2))


def one_stage(budget: Budget, tokens: int, num_layers: int) -> Budget:
    """Return `budget` with one stage, after the first prune layer, in the place of its three.

    It keeps what they keep on average over the layers after it, so that every mean stays (docs/method.md section 2).
    `tokens` are the visual tokens that the stage's share is of. A budget without stages is returned as it is.
    """
    if not budget.stages:
        return budget
    counts = budget.resolve(tokens)
    first, *_ = cuts = prune_layers(num_layers)
    layers = [after - before for before, after in pairwise((*cuts, num_layers - 1))]
    # Stages drop, so that none keeps more than the one before it.
    _, *kept = accumulate((counts.kept, *counts.stages), min)
    total = sum(number * stage for number, stage in zip(layers, kept, strict=True))
    mean = round_half_up(Fraction(total, num_layers - 1 - first))
    return replace(budget, stages=(Share(mean, tokens),))


def scaled_layers(layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Return a paper's 0-based `layers` of a 32-layer decoder, scaled to a decoder of `num_layers`.

    Decoders of 28 layers or more (7B, 13B and larger) keep the paper's layers. For others, the layers scale by
    depth/32, rounded half up (method.md section 3). Raises `BudgetError` if two layers coincide, or if one is the
    last.
    """
    scaled = _scaled(layers, num_layers)
    if not _apart(scaled, num_layers):
        enough = next(depth for depth in range(1, 32) if _apart(_scaled(layers, depth), depth))
        published, here = (", ".join(map(str, listed)) for listed in (layers, scaled))
        raise BudgetError(
            f"a decoder of {num_layers} layers is too shallow for pruning after layers {published} of 32 (they would "
            f"fall after layers {here}); at least {enough} layers are needed."
        )
    return scaled


def _scaled(layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    return layers if num_layers >= 28 else tuple((2 * layer * num_layers + 32) // 64 for layer in layers)


def _apart(layers: tuple[int, ...], num_layers: int) -> bool:
    """Return whether the layers ascend and end before the last layer."""
    return all(first < second for first, second in pairwise((*layers, num_layers - 1)))


@dataclass(frozen=True)
class FamilyRow:
    """The facts of a family that are known without importing its modules."""

    model_type: str
    """The `model_type` of a checkpoint's config.json."""
    architecture: str
    """The class in transformers, as `architectures` of config.json names it, or in LeRobot."""
    export: str
    """The class that reads its checkpoints and writes its graphs, as in `package.module:Class`: a
    `sinkprune.export.families.Family`."""
    runtime: str
    """The class that lays out its pictures: a `sinkprune.runtime.families.Family`."""
    budgets: Mapping[str, Budget]
    """The family's budgets by name (method.md section 3)."""
    folder: str | None = None
    """The function that reads folders which have more than transformers' files, as in `package.module:function`: a
    `sinkprune.export.checkpoint.folder.ReadFolder`. None for other families."""
    also: Sequence[str] = ()
    """Other values of `model_type` and `architectures` for the same configuration."""


def _family(model_type: str, architecture: str, export: str, runtime: str, **others: Any) -> FamilyRow:
    """Return a row with classes of this package, and `QWEN_BUDGETS` unless others are given."""
    modules = f"sinkprune.export.families.{export}", f"sinkprune.runtime.families.{runtime}"
    return FamilyRow(model_type, architecture, *modules, **{"budgets": QWEN_BUDGETS, **others})


# The part of Cosmos3 that answers is a Qwen3-VL.
_COSMOS3 = "cosmos3_omni", "cosmos3", "Cosmos3ForConditionalGeneration", "Cosmos3OmniForConditionalGeneration"
_NEXT, _VLA = "LlavaNextForConditionalGeneration", "OpenVLAForActionPrediction"
_READ_OPENVLA = "sinkprune.export.checkpoint.openvla:read_openvla"

LLAVA = _family("llava", "LlavaForConditionalGeneration", "llava:Llava", "llava:Llava", budgets=LLAVA_BUDGETS)
LLAVA_NEXT = _family("llava_next", _NEXT, "llava_next:LlavaNext", "llava_next:LlavaNext", budgets=LLAVA_NEXT_BUDGETS)
QWEN2_5_VL = _family("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen:Qwen25VL", "qwen:Qwen25VL")
QWEN2_VL = _family("qwen2_vl", "Qwen2VLForConditionalGeneration", "qwen:Qwen2VL", "qwen:Qwen2VL")
QWEN3_VL = _family("qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen:Qwen3VL", "qwen:Qwen3VL", also=_COSMOS3)
INTERNVL = _family("internvl", "InternVLForConditionalGeneration", "internvl:InternVL", "internvl:InternVL")
PALIGEMMA = _family("paligemma", "PaliGemmaForConditionalGeneration", "paligemma:PaliGemma", "policies:PaliGemma")
PI0 = _family("pi0", "PI0ForConditionalGeneration", "pi0:Pi0", "policies:Pi0")
PI05 = _family("pi05", "PI05Policy", "pi0:Pi05", "policies:Pi0")
PI0_FAST = _family("pi0_fast", "PI0FastPolicy", "pi0:Pi0Fast", "policies:Pi0")
OPENVLA = _family("openvla", _VLA, "openvla:OpenVla", "policies:OpenVla", folder=_READ_OPENVLA)
OPENVLA_OFT = _family("openvla_oft", _VLA, "openvla:OpenVlaOft", "policies:OpenVla")

FAMILIES = Registry[FamilyRow]("sinkprune.families")
"""Every family that an installed package registers, by its name in `bundle.json`."""


def parse_budget(family: str, name: str) -> Budget:
    """Return the budget `name` of `family`. Raises `BudgetError` with the known names."""
    base, *options = name.split("+")
    rows = FAMILIES[family].budgets
    if base not in rows:
        inside = f" (in '{name}')" if options else ""
        raise BudgetError(
            unknown_name(f"unknown budget '{base}'{inside}", base, rows, f"Family '{family}' has")
            + f" Options may follow, as in '{next(iter(rows))}+compact': {', '.join(OPTIONS)}, rho-N, from-BUDGET."
        )
    budget = rows[base]
    # First, so that the order of options changes nothing.
    for option in sorted(options, key=lambda option: not option.startswith(FROM)):
        try:
            budget = with_option(budget, option, rows)
        except BudgetError as error:
            raise BudgetError(f"budget '{name}': {error}") from error
    return budget


MAX_TOP_K = 3840
"""The largest K of a TopK in TensorRT 10 (ITopKLayer, NvInfer.h). The export keeps pruning graphs within it."""

TOWER = "vision"
"""The graph of the vision tower."""
MERGING_TOWER = "vision+tower"
"""The vision tower that merges similar tokens, with the weights of `vision`."""
BARLESS_TOWER = "vision+bars"
"""The vision tower that leaves out the tokens on a picture's bars, with the weights of `vision`."""
OTHER_TOWERS = {"merging": MERGING_TOWER, "bars": BARLESS_TOWER}
"""The towers of budgets with one of their own, by `Budget.tower`."""


def is_tower(graph: str) -> bool:
    """Return whether a graph is a vision tower."""
    return graph in (TOWER, *OTHER_TOWERS.values())


@dataclass(frozen=True)
class Plan:
    """The weightless graphs of one method at one budget, by their name under `graphs`."""

    sanitizer: str | None
    """The graph between `vision` and `projector`; None if all visual tokens go to the LLM."""
    select_after: dict[str, str]
    """The graph after each pruning layer, by the layer's 0-based number, ascending."""
    positions: Literal["keep", "compact"]
    """Whether survivors of a stage keep their position ids or are renumbered."""
    counts: Counts | None
    """The token counts of one group; None if images differ in their number of visual tokens."""
    shares: Budget | None
    """The shares that the graphs keep, if images differ in the tokens that the plan's tower gives. They are the
    budget's own, or those by which another method meets the budget's mean. None if there are `counts`."""
    tower: str | None = field(default=None, metadata=OPTIONAL)
    """The tower that runs in the place of `vision`, whose tokens `counts` or `shares` are of; None for `vision`."""
    queries: Literal["actions"] | None = field(default=None, metadata=OPTIONAL)
    """Whether stages read the attention of the rows that become actions, and not of the text."""

    def keeps(self, tokens: int, groups: int) -> tuple[Counts, int]:
        """Return what the graphs keep of a picture of `groups` groups of `tokens` visual tokens each.

        The result is the counts and their number of groups: a clip's frames may form one group.
        """
        if self.shares is not None:
            if self.shares.frames == "together":
                tokens, groups = tokens * groups, 1
            return self.shares.resolve(tokens, groups), groups
        if self.counts is None:
            raise ValueError("a plan has counts or shares")
        return self.counts.of_groups(groups), groups

    @cached_property
    def picture_share(self) -> Share | None:
        """The share of its tokens that each picture is made smaller to, before the tower; None keeps its size.

        A plan without graphs has one, its `shares.reserve`: no token of the smaller picture is dropped.
        """
        return self.shares.reserve if self.shares is not None and not self.graphs else None

    @cached_property
    def graphs(self) -> list[str]:
        """Return the names of all graphs, in the order they run."""
        return [*([] if self.sanitizer is None else [self.sanitizer]), *self.select_after.values()]

    @cached_property
    def cuts(self) -> list[int]:
        """Return the 0-based layers after which the plan prunes."""
        return [int(layer) for layer in self.select_after]
