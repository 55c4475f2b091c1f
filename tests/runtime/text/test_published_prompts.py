"""Conversations become the ids and the pixels of each family's own processor, whatever the order of their parts.

The small checkpoints have templates that write what the published ones write. Requests arrive as in the server.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.utils.chat_template_utils import render_jinja_template

from sinkprune import Clip, Pipeline
from sinkprune.export.families.internvl import InternVL
from sinkprune.export.families.llava import Llava
from sinkprune.export.families.llava_next import _MISTRAL_TEMPLATE as MISTRAL_DEFAULT
from sinkprune.export.families.qwen import Qwen3VL, Qwen25VL
from sinkprune.runtime.steps.pictures import decoded
from sinkprune.runtime.text.prompt import Prompt
from sinkprune.serving.chat_request import ChatReader
from support.models.checkpoints import MISTRAL_TEMPLATE, TEMPLATE
from support.models.clips import frames
from support.models.internvl_checkpoints import TEMPLATE as INTERNVL_TEMPLATE
from support.models.qwen_checkpoints import TEMPLATE as QWEN_TEMPLATE
from support.models.qwen_checkpoints import TOOL_TEMPLATE
from support.references.picture_prompts import clips_of, processed

QWEN = ("qwen", "qwen2-vl", "qwen3-vl")
VIDEO = (*QWEN, "internvl")
NAMES = ("gqa-112", "next", "next-mistral", *VIDEO)
FPS = 2
ONE, TWO, THREE = ({"type": "image_url", "image_url": {"url": str(number)}} for number in range(3))
EVEN, ODD = ({"type": "video_url", "video_url": {"url": str(frames)}} for frames in (4, 7))


def user(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


CONVERSATIONS = [
    [user("What is it?", ONE)],
    [user("Before:", ONE, "and after:", TWO, "What has changed?")],
    [user("", ONE, " ", TWO, "", "\n Wie groß? ", THREE, "What differs? ", "")],
    [
        {"role": "system", "content": "  Be brief.\n"},
        user("One:", ONE),
        {"role": "assistant", "content": [{"type": "text", "text": "A cup."}, {"type": "text", "text": " Or two."}]},
        user("And here?", TWO, THREE),
    ],
    [
        {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        user("Which?", ONE),
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Well?"},
    ],
    [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}, user("What is it?", ONE)],
]
CLIPS = [
    [user("What is it?", EVEN)],
    [user("See ", ONE, ODD, "\n and\u00a0tell", TWO)],
    [user("What happens?", ODD), {"role": "assistant", "content": "It falls."}, user(ONE, "And here?")],
]


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_pixels_are_those_of_the_family_s_processor(
    name: str, checkpoint: Callable[[str], Path], pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    pipe = pipeline(name, max_images=3, **({"max_frames": 8} if name in VIDEO else {}))
    turned = photo.transpose(Image.Transpose.ROTATE_180)
    images = [photo.resize((224, 200)), turned.resize((300, 150)), photo.resize((112, 56))]
    clips = {str(count): Clip(frames(count, (170, 140), photo), fps=FPS) for count in (4, 7)}
    pictures: Any = SimpleNamespace(image=lambda url, _: images[int(url)], video=lambda url, _: clips[url])
    reader = ChatReader("m", "none", "sinkpruner", pipe, pictures)
    for conversation in CONVERSATIONS + CLIPS * (name in VIDEO):
        request = reader.read(json.dumps({"model": "m", "messages": conversation}).encode()).request
        seen = [decoded(picture, pipe.family) for picture in request.pictures]
        layouts = [pipe.family.layout(picture) for picture in seen]
        shown = [picture for picture in seen if isinstance(picture, Image.Image)]
        [videos] = [clips_of(pipe, clip, FPS) for clip in seen if not isinstance(clip, Image.Image)] or [{}]
        expected = processed(name, checkpoint(name), theirs(conversation), shown, videos)
        ids = pipe.bundle.manifest.tokens
        tokens = [ids.image if picture in shown else ids.video or ids.image for picture in seen]
        prompt = pipe._model.encode_prompt(request, layouts)
        assert with_rows(prompt, layouts, tokens) == expected["input_ids"][0].tolist(), conversation
        if shown:
            pixels = [pipe.family.inputs(picture)["pixel_values"] for picture in shown]
            wanted = expected["pixel_values"].numpy()
            if wanted.ndim == 5:
                # LLaVA-NeXT's processor fills up the tiles of a picture to those of the largest.
                wanted = np.concatenate([tiles[: len(own)] for tiles, own in zip(wanted, pixels, strict=True)])
            found = np.concatenate([each.ravel() for each in pixels])
            np.testing.assert_allclose(found, wanted.ravel(), atol=1e-5, err_msg=str(conversation))


@pytest.mark.parametrize(
    ("ours", "published"),
    [
        (InternVL.chat_template, INTERNVL_TEMPLATE),
        (Llava.chat_template, TEMPLATE),
        (MISTRAL_DEFAULT, MISTRAL_TEMPLATE),
        (Qwen25VL.chat_template, QWEN_TEMPLATE),
        (Qwen3VL.chat_template, TOOL_TEMPLATE),
    ],
)
def test_a_checkpoint_without_a_template_gets_its_family_s(ours: str, published: str) -> None:
    for conversation in CONVERSATIONS:
        # The published one of LLaVA-NeXT with Mistral has a slip in the assistant's turns, and no second system text.
        asked = [theirs([message]) for message in conversation if message["role"] == "user"]
        asked += [theirs([{"role": "system", "content": "  Be brief.\n"}, conversation[-1]])]
        texts, _ = render_jinja_template(asked, chat_template=published, add_generation_prompt=True)
        assert render_jinja_template(asked, chat_template=ours, add_generation_prompt=True)[0] == texts


def theirs(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation as transformers takes it: LLaVA's templates need parts, and write nothing of a str."""
    messages = deepcopy(conversation)
    for message in messages:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        for part in message["content"]:
            part["type"] = part["type"].removesuffix("_url")
            part.pop(f"{part['type']}_url", None)
    return messages


def with_rows(prompt: Prompt, layouts: list[Any], tokens: list[int]) -> list[int]:
    """Return the ids of a prompt, with a picture's token as often as the picture has rows unpruned."""
    rows = []
    for layout, token in zip(layouts, tokens, strict=True):
        pieces = max(1, len(layout.texts) - 1)
        rows += [[token] * (len(layout.unpruned_rows) // pieces)] * pieces
    return [*chain.from_iterable(text + row for text, row in zip(prompt.texts, [*rows, []], strict=True))]
