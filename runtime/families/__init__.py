"""Model families at run time: what a model wants to see of an image, and where its tokens lie in it.

To add a family, add its module and its name below, and its counterpart in `sinkprune.export.families`.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from PIL import Image

from sinkprune.bundle import Manifest

Array = np.ndarray[Any, Any]


class Family(Protocol):
    """A family's image side."""

    visual_tokens: int
    """N of one image."""

    def preprocess(self, image: Image.Image) -> dict[str, Array]:
        """The `vision` graph's inputs for an RGB image, fp32."""
        ...

    def token_boxes(self, size: tuple[int, int]) -> Array:
        """[N,4]: left, top, right, bottom of each visual token, in pixels of an image of `size` (width, height)."""
        ...

    def encode_flops(self, kept: int) -> int:
        """Matmul FLOPs of the vision tower, and of the projector for `kept` tokens."""
        ...


def load_family(manifest: Manifest) -> Family:
    """The family a bundle belongs to. `read_bundle` has refused names that are not here."""
    from sinkprune.runtime.families.llava import Llava

    return {"llava": Llava}[manifest.family](manifest)
