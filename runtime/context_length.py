"""What to say of a request that is longer than the model's context, and what would fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sinkprune.contract.errors import PromptError


class Length(NamedTuple):
    """Of a request, in tokens."""

    text: int
    visual: int
    new: int
    limit: int
    """The model's positions."""


def too_long(length: Length, kept: Mapping[str, int], fewer_tokens: str) -> PromptError:
    """`kept` are the visual tokens each budget of the bundle would leave, `fewer_tokens` how pictures have fewer."""
    text, visual, new, limit = length
    room = limit - text - new
    fit = {tokens: name for name, tokens in kept.items() if tokens <= room}
    if room > 0 and kept and not fit:
        least = min(kept, key=kept.__getitem__)
        advice = (
            f"No budget of this bundle fits: '{least}' keeps fewest, {kept[least]} visual tokens, and there is room "
            f"for {room}. {fewer_tokens}"
        )
        if kept[least] - room < text:
            advice += " Or shorten the prompt."
    else:
        left = limit - text - visual
        way_out = f" or ask for at most {left} new tokens" if left > 0 else ""
        advice = f"Shorten the prompt{way_out}."
        if fit:
            advice += f" Budget '{fit[max(fit)]}' keeps {max(fit)} visual tokens, which would fit."
    return PromptError(
        f"the prompt is too long: {text} text tokens, {visual} visual tokens and up to {new} new tokens exceed the "
        f"model's {limit} positions. {advice}"
    )
