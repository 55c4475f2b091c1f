"""The runtime sides of pi0 and pi0.5."""

from __future__ import annotations

from typing import get_args

import numpy as np

from sinkprune.contract.manifest import LeRobotResize, Manifest, PolicyFacts, SiglipTower
from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import VisualLayout, grid_boxes, vit_flops
from sinkprune.runtime.families.llava import SquarePictures
from sinkprune.runtime.media.images import Fit
from sinkprune.runtime.processors.padded import PaddedProcessor, PaddedSquare, ResizeWithPad
from sinkprune.runtime.processors.square import PixelSize


class Pi0(SquarePictures):
    """The image side of a pi0 bundle. A picture is the frame of a camera, in one group of tokens."""

    _processor: PaddedSquare
    no_video = "a policy takes no video: it acts on the last frame of each camera. Give images."

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest, manifest.tower(SiglipTower))
        # LeRobot's functions by their names, else transformers' processor.
        by_lerobot = manifest.processor.get("image_processor_type") in get_args(LeRobotResize)
        self._processor = (ResizeWithPad if by_lerobot else PaddedProcessor)(manifest.processor)
        self._projector_flops = 2 * self._tower.hidden_size * manifest.language_model.hidden_size

    def fitted(self, fit: Fit) -> Pi0 | None:
        """Return None: policies are trained with one way to turn pictures into squares."""
        return None

    def _layout(self, size: PixelSize) -> VisualLayout:
        tokens = np.arange(self._tower.tokens)
        return VisualLayout(
            size=size,
            groups=1,
            tokens=self._tower.tokens,
            unpruned_rows=tokens,
            boxes=grid_boxes(self._processor.square_box(size), self._side, self._side),
            views=(range(self._tower.tokens),),
            # Kept rows keep their positions, which the expert's rotary embedding continues.
            places=tokens[None],
            extent=self._tower.tokens,
            tower_flops=vit_flops(self._tower, self._tower.tokens),
            projector_flops=self._projector_flops,
        )


class Pi05(Pi0):
    """The image side of a pi0.5 bundle."""


def state_prompt(policy: PolicyFacts, instruction: str, state: Array) -> str:
    """Return the text of a prompt with the normalised `state` [1,1,state_dim] in 256 bins from -1 to 1.

    As openpi's `PaligemmaTokenizer` and LeRobot write it: numbers below -1 are in bin -1, and those from 1 on in 255.
    """
    bins = np.digitize(state[0, 0, : len(policy.usual_state)], np.linspace(-1, 1, 257)[:-1]) - 1
    words = instruction.strip().replace("_", " ").replace("\n", " ")
    return f"Task: {words}, State: {' '.join(map(str, bins))};\nAction: "
