"""Model families at run time: what a model wants to see of an image, and where its tokens lie in it.

To add a family, add its module and its name below, and its counterpart in `sinkprune.export.families`.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from PIL import Image

from sinkprune.bundle import Manifest
from sinkprune.errors import BundleError

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
    """The family a bundle belongs to, tried out on one pixel; raises `BundleError`.

    `read_bundle` has refused families that are not here, but what a family writes of its image side only it can read.
    """
    from sinkprune.runtime.families.llava import Llava

    try:
        family: Family = {"llava": Llava}[manifest.family](manifest)
        pixel = Image.new("RGB", (1, 1))
        given = {name: list(array.shape) for name, array in family.preprocess(pixel).items()}
        counts = {family.visual_tokens, len(family.token_boxes(pixel.size))}
        family.encode_flops(kept=1)
    except Exception as error:
        # Settings in the checkpoint's own words may be wrong in any way.
        reason = f"{type(error).__name__}: {error}"
        raise BundleError(f"the bundle's `vision` or `processor` is malformed: {reason}. Export it again.") from error
    vision = manifest.graphs["vision"]
    taken = {spec.name: [1 if isinstance(size, str) else size for size in spec.shape] for spec in vision.inputs}
    expected = {spec.shape[1] for spec in vision.outputs if spec.name == "norms"}
    if given != taken or counts != expected:
        raise BundleError(
            f"the bundle's `vision` and `processor` do not fit its vision graph: they give {given} and "
            f"{sorted(counts)} visual tokens, the graph takes {taken} and gives {sorted(expected)}. Export it again."
        )
    return family
