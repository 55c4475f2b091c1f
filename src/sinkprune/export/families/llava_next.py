"""LLaVA-NeXT: LLaVA's tower, projector and decoder on tiles of an image at higher resolution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sinkprune.export.families.llava import Llava

_MISTRAL_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}"
    "{{ '<<SYS>>\n' }}{% for content in message['content'] %}{{ content['text'] }}{% endfor %}{{ '\n<</SYS>>\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ '[INST] ' }}"
    "{% for content in message['content'] if content['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] if content['type'] == 'text' %}{{ content['text'] }}{% endfor %}"
    "{{ ' [/INST]' }}"
    "{% else %}{% for content in message['content'] %}{{ ' ' + content['text'] }}{% endfor %}{{ '</s>' }}{% endif %}"
    "{% endfor %}"
)


class LlavaNext(Llava):
    """A `LlavaNextForConditionalGeneration` configuration.

    The model sees an image whole, and again as tiles: those of the resolution of `image_grid_pinpoints` that fits the
    image best. The whole image and each tile are one group each.
    """

    name = "llava-next"
    extra_rows: Mapping[str, str] = {"image_newline": "image_newline"}
    processors: Sequence[str] = ("LlavaNextImageProcessor",)
    towers: Sequence[str] = ("clip_vision_model",)
    cuts_edges = False
    one_square = False

    def __init__(self, source: str, config: Mapping[str, Any], salience: str | None = None) -> None:
        super().__init__(source, config, salience)
        side = self.vision.image_size
        self._pinpoints = [list(pinpoint) for pinpoint in self._config.image_grid_pinpoints]
        if not self._pinpoints or any(
            len(p) != 2 or min(p) < 1 or p[0] % side or p[1] % side for p in self._pinpoints
        ):
            raise self._error(
                f"image_grid_pinpoints is {self._pinpoints}, expected pairs of heights and "
                f"widths that are multiples of the tower's {side} pixels. Correct config.json."
            )
        self.most_groups = 1 + max(height * width for height, width in self._pinpoints) // side**2
        if self._config.text_config.model_type == "mistral":
            self.chat_template = _MISTRAL_TEMPLATE

    @property
    def default_processor(self) -> dict[str, Any]:
        """The settings of LlavaNextImageProcessor at the tower's image size, for those a checkpoint leaves out."""
        return {
            **super().default_processor,
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": self._pinpoints,
        }

    def processor(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        known = super().processor(settings)
        side, size = self.vision.image_size, known["size"]
        if set(size.values()) != {side}:
            raise self._error(
                f"its image processor shows the whole image at {size}, expected {side} "
                "pixels as the vision tower takes it. They do not belong together."
            )
        if [list(pinpoint) for pinpoint in known["image_grid_pinpoints"]] != self._pinpoints:
            raise self._error(
                f"its image processor has image_grid_pinpoints "
                f"{known['image_grid_pinpoints']}, config.json has {self._pinpoints}. They do not belong together."
            )
        return known
