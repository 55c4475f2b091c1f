"""Whether TensorRT can rank as many tokens as a plan would: known when it is exported, not when it is built."""

from __future__ import annotations

from sinkprune.contract.errors import BudgetError
from sinkprune.contract.top_k import MOST_OF_TOP_K
from sinkprune.export.pruning.plan import PlanFacts, UpTo


def check_ranked(facts: PlanFacts, count: int) -> None:
    """Refuse a plan that keeps `count` tokens of a picture in one step, if no TopK gives as many; raises
    `BudgetError` with what to lower."""
    if count <= MOST_OF_TOP_K:
        return
    in_all, remedy = facts.most_visual_tokens, "Choose a smaller budget."
    if isinstance(facts.tokens, UpTo):
        fit = in_all * MOST_OF_TOP_K // count
        remedy = (
            f"Allow up to {fit} tokens only: for images with --max-pixels {fit * facts.tokens.pixels_each} or less, "
            "for clips with fewer --max-frames or smaller frames, or option 'per-frame' where the sanitizer is what "
            "keeps as many."
        )
    raise BudgetError(
        f"images and clips may have up to {in_all} visual tokens, of which this budget keeps {count} in one step; "
        f"TensorRT's TopK gives at most {MOST_OF_TOP_K}. {remedy}"
    )
