"""pi0-FAST: PaliGemma that decodes action tokens (arXiv 2501.09747). Checkpoints are LeRobot's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from sinkprune.contract.checks import Bounds, from_json
from sinkprune.contract.manifest import PolicyFacts
from sinkprune.contract.model_facts import FastTokens
from sinkprune.export.checkpoint.lerobot import lerobot_pixels
from sinkprune.export.families.paligemma import PaliGemma, PaliGemmaFields
from sinkprune.export.families.pi0 import ProcessorFields, statistics_of


class _Pi0FastFields(PaliGemmaFields, total=False):
    chunk_size: Annotated[int, Bounds(1, 1 << 10)]
    max_state_dim: Annotated[int, Bounds(1, 1 << 12)]
    action_dim: Annotated[int, Bounds(1, 1 << 12)]


class Pi0Fast(PaliGemma):
    """A configuration of pi0-FAST, as `sinkprune.export.checkpoint.lerobot` translates it."""

    name = "pi0-fast"
    configured_as = "paligemma"
    config_fields: type = _Pi0FastFields
    processor_fields: type = ProcessorFields
    # LeRobot's second BOS is after the prompt, which has the state and ends its line.
    chat_template = (
        "{% for message in messages %}"
        "{% for content in message['content'] if content['type'] == 'image' %}{{ '<image>' }}{% endfor %}"
        "{{ bos_token }}"
        "{% for content in message['content'] if content['type'] == 'text' %}{{ content['text'] }}{% endfor %}"
        "{{ bos_token }}{% endfor %}"
    )

    def processor(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        square = {"height": self.vision.image_size, "width": self.vision.image_size}
        self._check_settings([("pad_size", settings.get("pad_size", square), (square,))])
        return {**lerobot_pixels(self.vision.image_size), **settings}

    def policy(self, settings: Mapping[str, Any]) -> PolicyFacts:
        config = self._config
        numbers = statistics_of(self._source, settings, {"state": config.max_state_dim, "actions": config.action_dim})
        fast = {"most": 256, "skip": 128, "scale": 10.0, "min_token": -354, "pieces": [], "begins": False}
        return PolicyFacts(
            None,
            config.chunk_size,
            config.max_state_dim,
            config.action_dim,
            1,
            None,
            None,
            **numbers,
            state_in_prompt=True,
            fast=from_json(FastTokens, {**fast, **settings.get("fast", {})}, "$.fast"),
        )
