"""The pictures of policies and of PaliGemma, whose kept tokens keep their positions.

pi0's and pi0.5's fill a part of a square, PaliGemma's and OpenVLA's are stretched to one. LeRobot resizes floats
bilinearly without antialiasing, as PyTorch's `interpolate`. Bars are black. LeRobot 0.4 filled them with -3, which
its later versions and openpi do not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from PIL import Image

from sinkprune.contract.checks import from_json
from sinkprune.contract.errors import ImageError
from sinkprune.contract.manifest import Colours, FusedTower, Manifest, PixelSettings, Scales, Side, SiglipTower
from sinkprune.contract.policy_facts import LeRobotResize, PolicyFacts
from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import VisualLayout, vit_flops
from sinkprune.runtime.families import Fit
from sinkprune.runtime.families.llava import Llava, PixelSize, SquarePictures, check_settings, pixel_values

if TYPE_CHECKING:
    from sinkprune.runtime.frames import FrameForm, FramePlan


class PaddedSettings(PixelSettings):
    """Conversion of an image to a part of a square."""

    size: dict[str, Side]
    pad_size: dict[str, Side]


class LeRobotSettings(PixelSettings):
    """Conversion of an image to a part of a square by LeRobot."""

    image_processor_type: LeRobotResize
    pad_size: dict[str, Side]


class PaddedSquare(ABC):
    """Resizes whole images into a square, and fills the rest of it."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings, self._side = settings, settings["pad_size"]["height"]

    @abstractmethod
    def __call__(self, image: Image.Image) -> Array:
        """Return [3,side,side] fp32 of an RGB image; raises `ImageError` if nothing of it would be left."""

    def square_box(self, size: PixelSize) -> tuple[float, float, float, float]:
        """Return the area of the whole square in pixels of an image of `size`: left, top, right, bottom."""
        resized = self._resized(size)
        (left, top), (across, down) = self._corner(resized), np.divide(size, resized).tolist()
        return -left * across, -top * down, (self._side - left) * across, (self._side - top) * down

    @abstractmethod
    def frame_plan(self, size: PixelSize) -> FramePlan:
        """Return what a call computes of an image of `size`, for the graph of frames; raises `ImageError`."""

    @abstractmethod
    def _resized(self, size: PixelSize) -> PixelSize:
        """Return the width and height of an image of `size` within the square; raises `ImageError` without pixels."""

    def _corner(self, resized: PixelSize) -> PixelSize:
        """Return where the upper left corner of an image of the size `resized` is in the square."""
        return 0, 0

    def _checked(self, resized: PixelSize, size: PixelSize) -> PixelSize:
        if 0 in resized:
            raise ImageError(
                f"the image has {size[0]}x{size[1]} pixels, of which nothing is left in a square of {self._side}. "
                "Give one whose sides differ less."
            )
        return resized


class PaddedProcessor(PaddedSquare):
    """Fills the square's right or its lower part with zeros."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Check `settings`, those of preprocessor_config.json; raises `SchemaError` if they are malformed."""
        from_json(PaddedSettings, settings, "$.processor")
        super().__init__(settings)

    def __call__(self, image: Image.Image) -> Array:
        size = self._resized(image.size)
        pixels = np.asarray(image.resize(size, Image.Resampling(self._settings["resample"])))
        padded = np.zeros((3, self._side, self._side), np.float32)
        padded[:, : size[1], : size[0]] = pixel_values(pixels, self._settings).transpose(2, 0, 1)
        return padded

    def frame_plan(self, size: PixelSize) -> FramePlan:
        from sinkprune.runtime.frames import Axis, PillowPlan

        columns, rows = (
            Axis(length, 0, length, new, 0, self._side) for length, new in zip(size, self._resized(size), strict=True)
        )
        return PillowPlan((columns,), (rows,), resample=self._settings["resample"])

    def _resized(self, size: PixelSize) -> PixelSize:
        width, height = size
        scale = min(self._side / max(height, 1), self._side / max(width, 1))
        return self._checked((int(width * scale), int(height * scale)), size)


class ResizeWithPad(PaddedSquare):
    """LeRobot's `resize_with_pad_torch` and `resize_with_pad`, by the names in `settings`; fills with black."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Check `settings`, those of a bundle's `processor`; raises `SchemaError` if they are malformed."""
        from_json(LeRobotSettings, settings, "$.processor")
        super().__init__(settings)
        self._centred = settings["image_processor_type"] == "resize_with_pad_torch"

    def __call__(self, image: Image.Image) -> Array:
        width, height = self._resized(image.size)
        pixels = _interpolated(_interpolated(np.asarray(image), height, axis=0), width, axis=1)
        left, top = self._corner((width, height))
        square = np.zeros((self._side, self._side, 3), np.float32)
        square[top : top + height, left : left + width] = pixels
        return np.ascontiguousarray(pixel_values(square, self._settings).transpose(2, 0, 1))

    def frame_plan(self, size: PixelSize) -> FramePlan:
        from sinkprune.runtime.frames import Axis, BilinearPlan

        resized = self._resized(size)
        columns, rows = (
            Axis(length, 0, length, new, -corner, self._side)
            for length, new, corner in zip(size, resized, self._corner(resized), strict=True)
        )
        return BilinearPlan(columns, rows, _neighbours)

    def _resized(self, size: PixelSize) -> PixelSize:
        width, height = size
        ratio = max(width / self._side, height / self._side, 1 / self._side)
        return self._checked((int(width / ratio), int(height / ratio)), size)

    def _corner(self, resized: PixelSize) -> PixelSize:
        share = 2 if self._centred else 1
        return (self._side - resized[0]) // share, (self._side - resized[1]) // share


def _interpolated(pixels: Array, length: int, axis: int) -> Array:
    """Return `pixels` [height,width,3] with `length` rows or columns, each a mix of the nearest two, fp32."""
    old = pixels.shape[axis]
    if old == length:
        return pixels
    *places, share = _neighbours(old, length)
    share = share.reshape([-1 if one == axis else 1 for one in range(3)])
    near, far = (np.take(pixels, each, axis).astype(np.float32) for each in places)
    return near * (np.float32(1) - share) + far * share


def _neighbours(old: int, length: int) -> tuple[Array, Array, Array]:
    """Return the near and the far old pixel of each of `length` new ones, and the share of the far one, fp32."""
    scale = np.float32(old / length)
    places = np.maximum((np.arange(length, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5), 0)
    first = np.minimum(places.astype(np.int64), old - 1)
    return first, np.minimum(first + 1, old - 1), (places - first).astype(np.float32)


def keeping_places(layout: VisualLayout) -> VisualLayout:
    """Return a `layout` of one group whose kept rows keep their positions."""
    return replace(layout, places=np.arange(layout.tokens)[None], extent=layout.tokens)


class PaliGemma(Llava):
    """The image side of a PaliGemma bundle."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        self._projector_flops = 2 * self._tower.hidden_size * manifest.language_model.hidden_size

    def _layout(self, size: PixelSize) -> VisualLayout:
        return keeping_places(super()._layout(size))


class _Policy(SquarePictures):
    """A picture is the frame of a camera, in one group of tokens."""

    no_video = "a policy takes no video: it acts on the last frame of each camera. Give images."

    def fitted(self, fit: Fit) -> None:
        """Return None: policies are trained with one way to turn pictures into squares."""


class Pi0(_Policy):
    """The image side of a bundle of pi0, pi0.5 or pi0-FAST."""

    _processor: PaddedSquare
    _masked = True

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest, manifest.tower(SiglipTower))
        # LeRobot's functions by their names, else transformers' processor.
        by_lerobot = manifest.processor.get("image_processor_type") in get_args(LeRobotResize)
        self._processor = (ResizeWithPad if by_lerobot else PaddedProcessor)(manifest.processor)
        self._projector_flops = 2 * self._tower.hidden_size * manifest.language_model.hidden_size

    def frame_form(self) -> FrameForm | None:
        if not isinstance(self._processor, ResizeWithPad):
            return super().frame_form()
        from sinkprune.runtime.frames import bilinear_form

        return bilinear_form(self._tower.image_size, self._dtype, self._settings)

    def _layout(self, size: PixelSize) -> VisualLayout:
        # The expert's rotary embedding continues the positions.
        return keeping_places(self._one_group(size, self._processor.square_box(size)))


class FusedSettings(PixelSettings):
    """Conversion of a stretched image to the inputs of two towers. `image_mean` and `image_std` are the first's."""

    size: dict[str, Side]
    second_mean: Colours
    second_std: Scales


class OpenVla(_Policy):
    """The image side of a bundle of OpenVLA or OpenVLA-OFT: pictures in the colours of both towers."""

    _tower: FusedTower

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
        return keeping_places(self._one_group(size, (0.0, 0.0, float(size[0]), float(size[1]))))


def state_prompt(policy: PolicyFacts, instruction: str, state: Array) -> str:
    """Return the text of a prompt with the normalised `state` [1,1,state_dim] in 256 bins from -1 to 1.

    As openpi's `PaligemmaTokenizer` and LeRobot write it: numbers below -1 are in bin -1, and those from 1 on in 255.
    pi0-FAST writes `Action: ` itself.
    """
    bins = np.digitize(state[0, 0, : len(policy.usual_state)], np.linspace(-1, 1, 257)[:-1]) - 1
    words = instruction.strip().replace("_", " ").replace("\n", " ")
    return f"Task: {words}, State: {' '.join(map(str, bins))};\n{'' if policy.fast else 'Action: '}"
