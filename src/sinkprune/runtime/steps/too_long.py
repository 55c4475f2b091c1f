"""Limits of engines, and errors and advice for requests that are too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sinkprune.contract.checks import counted
from sinkprune.contract.engines_manifest import LIMIT_OPTIONS, MOST_TOKENS, Limits
from sinkprune.contract.errors import NewTokensError, PromptError
from sinkprune.contract.manifest import Manifest
from sinkprune.runtime.media.frame import SampledFrames, Video
from sinkprune.runtime.steps.pictures import PictureLike


def build_again(manifest: Manifest, limits: Limits, **wanted: int) -> str:
    """Return advice to build engines for at least the `wanted` limits, by their fields. The other limits stay.

    Limits that hold no request back are left out: those of no engine, and of the bundle itself.
    """
    none = {"prompt_tokens": MOST_TOKENS, "new_tokens": MOST_TOKENS, "images": manifest.max_images}
    flags = [
        f"{option} {max(getattr(limits, name), wanted.get(name, 0))}"
        for name, option in LIMIT_OPTIONS.items()
        if 0 < getattr(limits, name) < none[name] or wanted.get(name, 0) > getattr(limits, name)
    ]
    return f"build the engines again with {' '.join(flags)} added to your sinkprune-build command"


def check_limits(manifest: Manifest, limits: Limits, text: int, new_tokens: int) -> None:
    """Raise `PromptError` for more tokens of text, or more new tokens, than the `limits` of engines."""
    lengths = (
        ("text tokens in the prompt", text, limits.prompt_tokens, PromptError),
        ("new tokens", new_tokens, limits.new_tokens, NewTokensError),
    )
    for what, wanted, most, error in lengths:
        if wanted > most:
            again = build_again(manifest, limits, prompt_tokens=text, new_tokens=new_tokens)
            raise error(
                f"{wanted} {what} are more than the {most} the engines were built for. Ask for less, or {again}."
            )


def too_many_pictures(manifest: Manifest, limits: Limits | None, pictures: int, most: int) -> PromptError:
    """Return the error for more pictures than the `most` that the bundle and its engines take."""
    again = []
    if pictures > manifest.max_images:
        again.append(f"export the checkpoint again with --max-images {pictures}")
    if limits:
        again.append(build_again(manifest, limits, images=pictures))
    return PromptError(
        f"the prompt has {counted(pictures, 'image')}, expected at most {most}. For more, {', and '.join(again)}."
    )


def fewer_tokens(manifest: Manifest, pictures: Sequence[PictureLike]) -> str:
    """Return advice on how to have fewer visual tokens."""
    if any(isinstance(picture, (Video, SampledFrames)) for picture in pictures):
        return "Give fewer or smaller frames, or export again with a smaller --max-frames or --max-pixels."
    fewer = "fewer images" if len(pictures) > 1 else ""
    if manifest.any_resolution:
        given = f"{fewer} or smaller ones" if fewer else "a smaller image"
        return f"Give {given}, or export again with a smaller --max-pixels."
    return f"Give {fewer}." if fewer else "Ask for fewer new tokens."


def too_long_error(
    text: int, visual: int, new: int, limit: int, kept: Mapping[str, int], fewer_tokens: str
) -> PromptError:
    """Return the error for a prompt that is too long for the model's `limit` of positions.

    `kept` are the visual tokens that each budget keeps; `fewer_tokens` is advice on how to have fewer.
    """
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
    is_answer = text + visual < limit and new >= text + visual
    error, found = (NewTokensError, "the answer") if is_answer else (PromptError, "the prompt")
    return error(
        f"{found} is too long: {text} text tokens, {visual} visual tokens and up to {new} new tokens exceed the "
        f"model's {limit} positions. {advice}"
    )
