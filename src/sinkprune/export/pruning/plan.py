"""The plan of a method's budget: its graphs and what they keep.

Graphs compute here what `Budget.resolve` and `sinkprune.contract.schedule` compute for the host, in the same integers
(method.md sections 1 to 3). `op` are the operators of a graph or function under construction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import onnx_ir as ir

from sinkprune.contract.budgets import MAX_TOP_K, NOMINAL_TOKENS, OTHER_TOWERS, Budget, Counts, Share
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.manifest import LanguageModel
from sinkprune.export.dialects import Dialect
from sinkprune.export.graph import Dim, Graph
from sinkprune.export.weights import Precision

MAX_ROUNDS = 1024
"""The most tokens that a graph chooses one by one. Each takes a dozen nodes."""


class UnreachableBudget(BudgetError):
    """The method cannot meet the budget: it cannot keep as few visual tokens per layer, or needs their grid."""


@dataclass(frozen=True)
class VariableTokens:
    """A number of visual tokens that differs from image to image."""

    most: int
    """No group has more."""
    pixels_each: int
    """The pixels of the resized image in a token."""
    in_all: int
    """No image or clip has more in all its groups."""
    tower_flops: Callable[[int], int] | None = field(default=None, compare=False)
    """Returns the vision tower's FLOPs on an image of so many tokens; None where no method needs them."""
    nominal: int = NOMINAL_TOKENS
    """Counts of so many tokens are shares of any image's."""


@dataclass(frozen=True)
class PlanFacts:
    """The facts of a model that methods use."""

    language_model: LanguageModel
    tokens: int | VariableTokens
    """N of each group."""
    visual_width: int
    """D, the width of `tokens`."""
    precision: Precision
    dialect: Dialect
    groups: int = 1
    """The most groups an image has."""
    images: int = 1
    """The most images a prompt has."""
    joined: bool = False
    """Whether groups are the frames of a clip, which are sanitised as one unless a budget has `per-frame`."""
    deepstack: int = 0
    """The number of sets of features, as wide as tokens, that each token takes to the decoder's first layers."""
    causal: bool = True
    """Whether a row of the decoder sees the rows up to its own, and not all rows."""
    action_rows: bool = False
    """Whether rows of the prompt become actions."""
    merged: int = 0
    """The tokens of each group that a merging tower takes away; 0 for one that cannot merge, and after merging."""
    padded: bool = False
    """Whether pictures may have bars, whose tokens a tower can leave out."""

    def after_tower(self, budget: Budget) -> PlanFacts:
        """Return the facts of the tokens that the tower of `budget` leaves."""
        if budget.tower is None or not isinstance(self.tokens, int):
            return self
        if budget.tower == "bars":
            # The shares of a picture without bars are the counts of all tokens, exactly.
            return replace(self, tokens=VariableTokens(self.tokens, 1, self.tokens, nominal=self.tokens))
        return replace(self, tokens=self.tokens - self.merged, merged=0)

    def shares_after_tower(self, budget: Budget) -> Budget:
        """Return the shares of the tokens that the tower of `budget` leaves.

        After merging they are as many as of all tokens. Raises `BudgetError` for a tower that cannot merge, for a
        budget of more tokens than it leaves, and for pictures without bars.
        """
        if budget.queries and not self.action_rows:
            raise BudgetError(
                "option 'action-rows' is for policies whose rows become actions (OpenVLA-OFT), and this model is "
                "none. Leave the option out."
            )
        if budget.tower == "bars" and not self.padded:
            raise BudgetError(
                "option 'bars' is for families that see one padded square of each picture (LLaVA-1.5, PaliGemma, "
                "pi0, pi0.5). Leave the option out."
            )
        if budget.tower != "merging":
            return budget
        if not self.merged or not isinstance(self.tokens, int):
            raise BudgetError(
                "option 'tower' is for CLIP and SigLIP towers (LLaVA, LLaVA-NeXT, PaliGemma, pi0, pi0.5, pi0-FAST) "
                "of a few blocks at least, and this model has another. Leave the option out."
            )
        left, counts = self.tokens - self.merged, budget.resolve(self.tokens)
        shares = replace(
            budget,
            reserve=Share(counts.reserve, left),
            diverse=Share(counts.diverse, left),
            stages=tuple(Share(stage, left) for stage in counts.stages),
        )
        if budget.sanitizer and shares.resolve(left).outliers + counts.reserve + counts.diverse > left:
            raise BudgetError(
                f"the budget keeps {counts.kept} of {self.tokens} tokens before the LLM, and a tower that merges "
                f"similar tokens leaves {left}. Choose a smaller budget, or leave out option 'tower'."
            )
        return shares

    def check_grid(self, budget: Budget) -> None:
        """Raise `UnreachableBudget` for a tower that leaves no grid of tokens, in a method that reads one."""
        if budget.tower is not None:
            option = OTHER_TOWERS[budget.tower].removeprefix("vision+")
            raise UnreachableBudget(f"the method reads the grid of tokens, of which option '{option}' leaves none")

    @property
    def deepstack_width(self) -> int:
        """The width of all sets together."""
        return self.deepstack * self.visual_width

    @property
    def nominal_tokens(self) -> int:
        """N, or `VariableTokens.nominal` if N differs from image to image."""
        # OpenVINO computes shapes in 32 bits, so this times the tokens of the longest clip must fit.
        return self.tokens.nominal if isinstance(self.tokens, VariableTokens) else self.tokens

    @property
    def most_in_group(self) -> int:
        """The most visual tokens of a group."""
        return self.tokens.most if isinstance(self.tokens, VariableTokens) else self.tokens

    @property
    def most_visual_tokens(self) -> int:
        """The most visual tokens of an image or clip, in all its groups."""
        return self.tokens.in_all if isinstance(self.tokens, VariableTokens) else self.groups * self.tokens

    @property
    def visual_dim(self) -> Dim:
        """N in the shape of a graph's tensor."""
        return "N" if isinstance(self.tokens, VariableTokens) else self.tokens

    def as_one(self, kept: Budget) -> bool:
        """Return whether the groups are sanitised as one."""
        return self.joined and kept.frames == "together"

    def most_at_once(self, kept: Budget) -> int:
        """Return the most tokens that are sanitised at once."""
        return self.most_visual_tokens if self.as_one(kept) else self.most_in_group

    def most_counts(self, kept: Budget) -> Counts:
        """Return the counts of the shares `kept`, of the most tokens that are sanitised at once."""
        return kept.resolve(self.most_at_once(kept))

    def check_ranked(self, count: int) -> None:
        """Raise `BudgetError` if a step keeps more tokens than TensorRT's TopK returns, in a bundle for TensorRT.

        TensorRT compiles the attention of opset 24 in fp16 only, so a bundle in fp32 is for other libraries.
        """
        if self.precision.name != "fp32" or self.dialect.OPSET < 24:
            why = f"TensorRT's TopK gives at most {MAX_TOP_K}, which binds all bundles but those in fp32 of opset24"
            self._check_at_most(count, MAX_TOP_K, why)

    def check_rounds(self, count: int) -> None:
        """Raise `BudgetError` if a method that chooses tokens one by one would have more than `MAX_ROUNDS` rounds."""
        self._check_at_most(count, MAX_ROUNDS, f"the method chooses tokens one by one, at most {MAX_ROUNDS}")

    def _check_at_most(self, count: int, limit: int, why: str) -> None:
        if count <= limit:
            return
        in_all, remedy = self.most_visual_tokens, "Choose a smaller budget, or for clips fewer --max-frames."
        if isinstance(self.tokens, VariableTokens):
            fit = in_all * limit // count
            remedy = (
                f"Allow up to {fit} tokens only: for images with --max-pixels {fit * self.tokens.pixels_each} or "
                "less, for clips with fewer --max-frames or smaller frames, or option 'per-frame' where the "
                "sanitizer is what keeps as many."
            )
        raise BudgetError(
            f"images and clips may have up to {in_all} visual tokens, of which this budget keeps {count} in one "
            f"step; {why}. {remedy}"
        )


@dataclass(frozen=True)
class PlanGraphs:
    """The graphs of a method at a budget."""

    kept: Budget
    """The shares of an image's visual tokens that the graphs keep, and their options.

    These are the budget's own, or shares that meet its mean (`sinkprune.export.pruning.equal_mean`).
    """
    sanitizer: Graph | None = None
    """The graph before the LLM; None for methods that drop no tokens there."""
    select_after: dict[int, Graph] = field(default_factory=dict)
    """The graph after each decoder layer (0-based) where the method drops tokens."""

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """Return all graphs."""
        own = () if self.sanitizer is None else (self.sanitizer,)
        return (*own, *self.select_after.values())


Method = Callable[[PlanFacts, Budget], PlanGraphs]
"""Builds the plan of a budget.

Raises `UnreachableBudget` if the method cannot keep as few tokens, and `BudgetError` if the model is too shallow.
"""


TokenCount = int | ir.Value
"""A number of tokens: known at export, or [1] int64 in the graph."""


def as_vector(count: TokenCount) -> list[int] | ir.Value:
    """Return `count` as an operand of shape [1]."""
    return [count] if isinstance(count, int) else count


class SanitizerCounts(NamedTuple):
    """The tokens that a sanitizer keeps of each group."""

    reserve: TokenCount
    """k_res."""
    diverse: TokenCount
    """k_div."""
    others: TokenCount
    """The number of tokens that are neither outliers nor among the k_res."""


def sanitizer_counts(op: Any, facts: PlanFacts, kept: Budget, norms: ir.Value) -> SanitizerCounts:
    """Return the counts of the shares `kept`, of the tokens of `norms` [G,N]."""
    if isinstance(facts.tokens, int):
        counts = kept.resolve(facts.tokens)
        return SanitizerCounts(counts.reserve, counts.diverse, facts.tokens - counts.outliers - counts.reserve)
    tokens = op.Shape(norms, start=1, end=2)
    low = op.Sub(tokens, outlier_count(op, tokens, [kept.outlier_per_mille])) if kept.remove_outliers else tokens
    reserve = op.Min(share_of(op, tokens, kept.reserve), low)
    others = op.Sub(low, reserve)
    return SanitizerCounts(reserve, op.Min(share_of(op, tokens, kept.diverse), others), others)


def rows_kept(facts: PlanFacts, kept: Budget) -> Dim:
    """Return n0, the rows that a sanitizer of the shares `kept` keeps of each group, for the shape of a tensor."""
    return kept.resolve(facts.tokens).kept if isinstance(facts.tokens, int) else "n0"


def outlier_count(op: Any, tokens: ir.Value, per_mille: ir.Value | list[int]) -> ir.Value:
    """Return |H| [1] int64 of a group of `tokens` [1] int64: a share rounded up, at least 1."""
    return op.Max(op.Div(op.Add(op.Mul(tokens, per_mille), [999]), [1000]), [1])


def of_all_groups(kept: int | Share, facts: PlanFacts) -> int | Share:
    """Return the tokens of all groups of an image that survive a stage; a count `kept` is that of one group."""
    # The graph counts the groups, so a count for each group is a share of all tokens.
    return Share(kept, facts.nominal_tokens) if isinstance(kept, int) and facts.groups > 1 else kept


def share_of(op: Any, tokens: ir.Value, part: Share) -> ir.Value:
    """Return `part` of `tokens` [1] int64, rounded as in `Share.of`."""
    if part.numerator == 0:
        return op.Mul(tokens, [0])
    return op.Max(op.Div(op.Mul(tokens, [part.numerator]), [part.denominator]), [1])
