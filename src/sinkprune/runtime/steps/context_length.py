"""Checks that a request fits the model's context and the engines, and that pruning drops something."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import LIMIT_OPTIONS, MOST_TOKENS, Limits
from sinkprune.contract.checks import counted
from sinkprune.contract.errors import NewTokensError, PromptError, PruningError
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.schedule import Schedule, VisualLayout, schedule
from sinkprune.runtime.media.clip import SampledFrames, Video
from sinkprune.runtime.steps.pictures import PictureLike
from sinkprune.runtime.steps.request import Request


def check_picture_count(manifest: Manifest, limits: Limits | None, pictures: int) -> None:
    """Reject more pictures than the bundle or its engines take; raises `PromptError`."""
    most = limits.images if limits else manifest.max_images
    if pictures > most:
        again = []
        if pictures > manifest.max_images:
            again.append(f"export the checkpoint again with --max-images {pictures}")
        if limits:
            again.append(_build_again(manifest, limits, images=pictures))
        raise PromptError(
            f"the prompt has {counted(pictures, 'image')}, expected at most {most}. For more, {', and '.join(again)}."
        )


def check_prompt_length(manifest: Manifest, limits: Limits | None, text: int, visual: int) -> None:
    """Reject a policy's prompt with too many tokens of `text` and `visual` rows; raises `PromptError`."""
    trained = manifest.policy.most_prompt_tokens if manifest.policy else None
    if trained is not None and text > trained:
        raise PromptError(
            f"{text} text tokens in the prompt are more than the {trained} of the policy's training. Give a shorter "
            "instruction."
        )
    if limits is not None and text > limits.prompt_tokens:
        raise PromptError(
            f"{text} text tokens in the prompt are more than the {limits.prompt_tokens} the engines were built for. "
            f"Give a shorter instruction, or {_build_again(manifest, limits, prompt_tokens=text)}."
        )
    most = manifest.language_model.max_positions
    if text + visual > most:
        raise PromptError(
            f"the prompt is too long: {text} text tokens and {visual} visual tokens exceed the model's {most} "
            "positions. Give a shorter instruction."
        )


def check_length(
    manifest: Manifest,
    limits: Limits | None,
    request: Request,
    text: int,
    visual: int,
    layouts: Sequence[VisualLayout],
) -> None:
    """Reject a request that is too long, with `text` tokens of text and `visual` rows; raises `PromptError`.

    `limits` are those of engines; None for graphs, which have none. `layouts` are those of the pictures.
    """
    if limits is not None:
        lengths = (
            ("text tokens in the prompt", text, limits.prompt_tokens, PromptError),
            ("new tokens", request.max_new_tokens, limits.new_tokens, NewTokensError),
        )
        for what, wanted, most, error in lengths:
            if wanted > most:
                again = _build_again(manifest, limits, prompt_tokens=text, new_tokens=request.max_new_tokens)
                raise error(
                    f"{wanted} {what} are more than the {most} the engines were built for. Ask for less, or {again}."
                )
    new, limit = request.max_new_tokens, manifest.language_model.max_positions
    if text + visual + new > limit:
        budgets = manifest.plans[request.method]
        kept = {name: schedule(manifest, request.method, name, layouts).rows for name in budgets}
        raise too_long_error(text, visual, new, limit, kept, _fewer_tokens(manifest, request.pictures))


def runnable(
    manifest: Manifest,
    limits: Limits | None,
    request: Request,
    schedules: Iterable[Schedule],
    text: int,
    layouts: Sequence[VisualLayout],
) -> list[Schedule]:
    """Return those of the `schedules`, in their order, at which a request with `text` tokens of text can run.

    Raises the `PromptError` or `PruningError` of the last where none can run.
    """
    found, refusal = [], None
    for planned in schedules:
        try:
            check_length(manifest, limits, request, text, planned.rows, layouts)
            _check_pruning(planned, layouts, manifest.language_model.num_layers)
        except (PromptError, PruningError) as error:
            refusal = error
        else:
            found.append(planned)
    if not found and refusal is not None:
        raise refusal
    return found


def _check_pruning(planned: Schedule, layouts: Sequence[VisualLayout], num_layers: int) -> None:
    """Reject a plan that would drop nothing; raises `PruningError`."""
    left = planned.reaching(num_layers)
    drops = planned.plan is not None and planned.plan.picture_share is None
    if drops and not layouts:
        raise PruningError(
            f"pruning was asked for, and the request has no picture. Leave out the budget, or give '{UNPRUNED}'."
        )
    if drops and left == sum(layout.all_tokens for layout in layouts):
        raise PruningError(
            f"pruning was asked for and nothing was pruned: the image has {counted(left, 'visual token')} and "
            f"the budget keeps as many. Use budget '{UNPRUNED}', or a smaller one."
        )


def _build_again(manifest: Manifest, limits: Limits, **wanted: int) -> str:
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


def _fewer_tokens(manifest: Manifest, pictures: Sequence[PictureLike]) -> str:
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
