"""The largest request that engines are built for."""

from __future__ import annotations

from sinkprune.contract.checks.format_value import counted
from sinkprune.contract.checks.ranges import WholeNumber
from sinkprune.contract.engines_manifest import Limits
from sinkprune.contract.errors import UsageError
from sinkprune.contract.manifest import Manifest
from sinkprune.runtime.families import load_family

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
    all its cameras, no new tokens, and if None as many tokens of prompt as in its training; if the checkpoint does
    not say, 64, or 200 with the state in the prompt. Raises `UsageError` for values out of range, beyond the model's
    positions, or beyond the bundle's images, and for limits that a policy does not have.
    """
    prompt_tokens = None if prompt_tokens is None else MAX_PROMPT.check(prompt_tokens)
    new_tokens = None if new_tokens is None else MAX_NEW_TOKENS.check(new_tokens)
    images = None if images is None else MAX_IMAGES.check(images)
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
        new_tokens, images = 0, manifest.max_images
        usual = _MOST_INSTRUCTION_AND_STATE if manifest.policy.state_in_prompt else _MOST_INSTRUCTION
        most_prompt = manifest.policy.most_prompt_tokens or usual
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
