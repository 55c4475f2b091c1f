"""The question of the gate: pictures and a prompt that the engines accept."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks.format_value import counted
from sinkprune.contract.errors import ImageError, PromptError, UsageError
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import Manifest
from sinkprune.runtime.acting.observation import state_prompt
from sinkprune.runtime.families import load_family
from sinkprune.runtime.media.clip import Picture
from sinkprune.runtime.media.fits import Fit
from sinkprune.runtime.steps.context_length import check_picture_count
from sinkprune.runtime.steps.pictures import decoded
from sinkprune.runtime.steps.request import check_texts
from sinkprune.runtime.text.prompt import PromptEncoder

NEW_TOKENS = 8
"""Tokens of each answer: a decoder's first call fills its caches, the others read them."""
NO_LIMITS: Mapping[str, int] = {}


@dataclass(frozen=True)
class GateQuestion:
    """Pictures and a prompt, for the graphs and the engines. A policy acts on them instead."""

    images: Sequence[Picture]
    """The decoded pictures of one prompt; for a policy, the frame of each camera."""
    prompt: str
    """The question; for a policy, the instruction."""
    new_tokens: int = NEW_TOKENS
    """Tokens of each answer; fewer if the engines accept fewer."""
    fit: Fit | None = None
    """How a picture becomes a square; None is the checkpoint's own way."""

    def seen_shares(self, manifest: Manifest) -> tuple[float, ...]:
        """Return the share of each picture's area that the model sees. Raises `ImageError`."""
        family = load_family(manifest, self.fit)
        return tuple(family.layout(image).seen_share for image in self.images)

    def sha256(self, bundle: Bundle) -> str:
        """Return the sum of the question and the bundle, in hexadecimal."""
        fit = f" {self.fit}" if self.fit else ""
        digest = hashlib.sha256(f"{bundle.sha256} {self.new_tokens} {self.prompt}{fit}".encode())
        for image in self.images:
            pixels = np.asarray(image)
            digest.update(f" {pixels.shape} ".encode() + pixels.tobytes())
        return digest.hexdigest()


def picture_files(files: Sequence[Path], manifest: Manifest) -> list[Path]:
    """Return the picture files of a question about `files`: for a policy, one file may be all cameras' frame.

    Raises `ImageError` for another number of files than a policy has cameras.
    """
    cameras = len(files) if manifest.policy is None else manifest.max_images
    if len(files) not in (1, cameras):
        raise ImageError(
            f"found {len(files)} pictures, and the policy has {counted(cameras, 'camera')}. Give one picture for "
            "each camera, or one for all."
        )
    return list(files) if len(files) == cameras else [*files] * cameras


def read_question(
    files: Sequence[Path],
    prompt: str,
    bundle: Bundle,
    limits: Mapping[str, int] = NO_LIMITS,
    fit: Fit | None = None,
) -> GateQuestion:
    """Return the pictures in `files` and the question about them, for engines with the enforced `limits`.

    `fit` is that of `load_family`. Raises `ImageError`, `PromptError` for a question that is longer than the engines
    accept, and `UsageError` for a `fit` that the bundle's family does not have.
    """
    texts = [*[""] * len(files), prompt]
    check_texts(texts, len(files))
    family = load_family(bundle.manifest, fit)
    check_picture_count(bundle.manifest, None, len(files))
    images = [decoded(file, family) for file in files]
    most = limits.get("prompt_tokens")
    if most is not None:
        tokens = _text_tokens(bundle, texts, [*map(family.layout, images)])
        if tokens > most:
            policy = bundle.manifest.policy
            trained = policy.most_prompt_tokens if policy else None
            again = f", or build with --max-prompt {tokens}" if trained is None or tokens <= trained else ""
            raise PromptError(
                f"the {_noun(bundle)} '{prompt}' has {tokens} text tokens with its template, and the engines take "
                f"{most}. Give a shorter one (sinkprune check --prompt, sinkprune build --check-prompt){again}."
            )
    return GateQuestion(images, prompt, min(NEW_TOKENS, limits.get("new_tokens", NEW_TOKENS)), fit)


def check_prompt_limit(bundle: Bundle, most: int) -> None:
    """Raise `UsageError` if a limit of `most` text tokens has no room for a question of one letter."""
    policy, layout = bundle.manifest.policy, load_family(bundle.manifest).layout(Image.new("RGB", (224, 224)))
    question = "a"
    if policy is not None and policy.state_in_prompt:
        # The lowest numbers have the fewest digits.
        question = state_prompt(policy, question, np.full((1, 1, policy.state_dim), -1.0))
    least = _text_tokens(bundle, ["", question], [layout])
    if most < least:
        raise UsageError(
            f"--max-prompt is {most}, and the shortest {_noun(bundle)} has {least} text tokens with its template. "
            f"Give {least} or more."
        )


def _noun(bundle: Bundle) -> str:
    """Return what the prompt of a bundle is called."""
    return "question" if bundle.manifest.policy is None else "instruction"


def _text_tokens(bundle: Bundle, texts: Sequence[str], layouts: Sequence[VisualLayout]) -> int:
    """Return the text tokens of a prompt about pictures of these layouts, with its chat template."""
    return PromptEncoder.of_bundle(bundle).encode(texts, [layout.texts for layout in layouts]).text_tokens
