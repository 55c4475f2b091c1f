"""The pictures of PaliGemma: stretched to a square; kept tokens keep their positions."""

from __future__ import annotations

from sinkprune.contract.manifest import Manifest
from sinkprune.contract.schedule import VisualLayout
from sinkprune.runtime.families.llava import Llava, PixelSize, keeping_places


class PaliGemma(Llava):
    """The image side of a PaliGemma bundle."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        self._projector_flops = 2 * self._tower.hidden_size * manifest.language_model.hidden_size

    def _layout(self, size: PixelSize) -> VisualLayout:
        return keeping_places(super()._layout(size))
