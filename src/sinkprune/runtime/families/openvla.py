"""The pictures of OpenVLA and OpenVLA-OFT: stretched to a square, in the colours of both towers."""

from __future__ import annotations

import numpy as np
from PIL import Image

from sinkprune.contract.checks import from_json
from sinkprune.contract.manifest import Colours, FusedTower, Manifest, PixelSettings, Scales, Side
from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import VisualLayout, vit_flops
from sinkprune.runtime.families import Fit
from sinkprune.runtime.families.llava import PixelSize, SquarePictures, check_settings, pixel_values


class FusedSettings(PixelSettings):
    """Conversion of a stretched image to the inputs of two towers. `image_mean` and `image_std` are the first's."""

    size: dict[str, Side]
    second_mean: Colours
    second_std: Scales


class OpenVla(SquarePictures):
    """The image side of a bundle of OpenVLA or OpenVLA-OFT. A picture is a camera's frame, in one group of tokens."""

    _tower: FusedTower
    no_video = "a policy takes no video: it acts on the last frame of each camera. Give images."

    def __init__(self, manifest: Manifest) -> None:
        tower, settings = manifest.tower(FusedTower), manifest.processor
        super().__init__(manifest, tower)
        from_json(FusedSettings, {**settings}, "$.processor")
        self._second = {**settings, "image_mean": settings["second_mean"], "image_std": settings["second_std"]}
        check_settings(self._second, self._dtype)
        d, width = tower.hidden_size + tower.dino.hidden_size, manifest.language_model.hidden_size
        self._projector_flops = 2 * (4 * d * d + 4 * d * width + width**2)

    def frame_form(self) -> None:
        """Return None: the host prepares frames."""
        return

    def fitted(self, fit: Fit) -> OpenVla | None:
        """Return None: policies are trained with one way to turn pictures into squares."""
        return None

    def _pixels(self, image: Image.Image) -> Array:
        """Return [1,6,side,side] fp32: DINOv2's colours, then SigLIP's."""
        size, resample = self._settings["size"], Image.Resampling(self._settings["resample"])
        pixels = np.asarray(image.resize((size["width"], size["height"]), resample))
        both = [pixel_values(pixels, settings) for settings in (self._settings, self._second)]
        return np.ascontiguousarray(np.concatenate(both, axis=2).transpose(2, 0, 1))[None]

    @property
    def _tower_flops(self) -> int:
        tower, dino = self._tower, self._tower.dino
        return vit_flops(tower, tower.tokens, {}) + vit_flops(dino, 1 + self._tower.registers + dino.tokens, {})

    def _layout(self, size: PixelSize) -> VisualLayout:
        return self._keeping_places(size, (0.0, 0.0, float(size[0]), float(size[1])))
