"""Pictures and questions as a bundle's model takes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sinkprune.calibration.tasks import Item
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.files.untrusted import TEMPLATE_BYTES, TOKENIZER_BYTES
from sinkprune.contract.manifest import CHAT_TEMPLATE, TOKENIZER
from sinkprune.runtime.families import Seen, load_family
from sinkprune.runtime.steps.pictures import decoded, see
from sinkprune.runtime.text.prompt import PromptEncoder


class Shown(NamedTuple):
    """A prompt about one picture, as a model takes it."""

    seen: Seen
    texts: list[list[int]]
    """Token ids before the picture and behind it."""


def show(bundle: Bundle, items: Iterable[Item]) -> list[Shown]:
    """Pictures and questions as the model of `bundle` takes them; raises `ImageError` and `PromptError`."""
    family, manifest = load_family(bundle.manifest), bundle.manifest
    tokenizer = bundle.files[TOKENIZER].read(TOKENIZER_BYTES)
    prompts = PromptEncoder(tokenizer, bundle.files[CHAT_TEMPLATE].read(TEMPLATE_BYTES), manifest.tokens)
    shown = []
    for item in items:
        picture = item.load_image()
        seen = see(picture, decoded(picture, family), family, manifest)
        shown.append(Shown(seen, prompts.encode(["", item.question.prompt], [seen.layout.texts]).texts))
    return shown
