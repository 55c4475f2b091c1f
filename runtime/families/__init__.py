"""Model families at run time: what a model wants to see of an image, and where its tokens lie in it and in a prompt.

To add a family, add its module and its name below, and its counterpart in `sinkprune.export.families`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from PIL import Image

from sinkprune.contract.errors import BundleError
from sinkprune.contract.manifest import Manifest
from sinkprune.runtime.clip import Shown, Video
from sinkprune.runtime.rotary import Positions

Array = np.ndarray[Any, Any]
Size = tuple[int, int]
"""Width and height of an image in pixels."""


class Family(Protocol):
    """A family's image side: an image is G groups of N visual tokens."""

    between_rows: str | None
    """The learned row, by its name in the embedding table's file, that `unpruned_rows` puts at the end of a line."""

    def preprocess(self, image: Any) -> dict[str, Array]:
        """The `vision` graph's inputs for an RGB image, fp32 and int64; raises `ImageError`.

        Families that take video take a `Shown` clip too, and its `ClipSize` for a size.
        """
        ...

    def shown(self, video: Video) -> Shown:
        """The frames of a clip or a video file that the model is shown; raises `VideoError` where it takes none."""
        ...

    def visual_tokens(self, size: Size) -> int:
        """N of each group of an image of `size`; raises `ImageError`."""
        ...

    def groups(self, size: Size) -> int:
        """G of an image of `size`; raises `ImageError`."""
        ...

    def unpruned_rows(self, size: Size) -> Array:
        """[V] int64: the rows of the model's own prompt, unpruned: tokens counted through all groups, -1 at the end
        of a line."""
        ...

    def most_unpruned_rows(self, most: int) -> int:
        """The largest V, for groups of at most `most` tokens."""
        ...

    def pictures(self, most: int) -> dict[str, tuple[int, int]]:
        """The largest N and G of each kind of picture, by its name, where groups have at most `most` tokens.

        A kind that lies within another is left out; of the rest those with most groups stand first.
        """
        ...

    def token_boxes(self, size: Size) -> Array:
        """[G*N,4]: left, top, right, bottom of each visual token, in pixels of an image of `size`."""
        ...

    def views(self, size: Size) -> list[range]:
        """The tokens that can be drawn on one picture, because they show each part of the image once."""
        ...

    def positions(self, texts: Sequence[int], images: Sequence[tuple[Size, Array]]) -> Positions:
        """The positions of a prompt's rows: texts of so many rows each, and between them the rows of images of a size
        and the `tokens` [V] they stand for."""
        ...

    def vision_sizes(self, n: int, groups: int) -> dict[str, tuple[int, int, int]]:
        """The smallest, usual and largest size of each dimension that only `vision` has, for pictures of up to
        `groups` groups of `n` tokens."""
        ...

    def encode_flops(self, size: Size, kept: int) -> int:
        """Matmul FLOPs of the vision tower, and of the projector for `kept` tokens."""
        ...


def load_family(manifest: Manifest) -> Family:
    """The family a bundle belongs to, tried out on one pixel; raises `BundleError`.

    `read_bundle` has refused families that are not here, but what a family writes of its image side only it can read.
    """
    from sinkprune.runtime.families.llava import Llava
    from sinkprune.runtime.families.llava_next import LlavaNext
    from sinkprune.runtime.families.qwen2_5_vl import Qwen25VL
    from sinkprune.runtime.families.qwen2_vl import Qwen2VL

    families: dict[str, type[Llava | LlavaNext | Qwen25VL | Qwen2VL]] = {
        "llava": Llava,
        "llava-next": LlavaNext,
        "qwen2.5-vl": Qwen25VL,
        "qwen2-vl": Qwen2VL,
    }
    try:
        family: Family = families[manifest.family](manifest)
        pixel = Image.new("RGB", (1, 1))
        given = {name: list(array.shape) for name, array in family.preprocess(pixel).items()}
        groups = family.groups(pixel.size)
        counts = {family.visual_tokens(pixel.size), len(family.token_boxes(pixel.size)) // groups}
        family.unpruned_rows(pixel.size)
        family.encode_flops(pixel.size, kept=1)
    except Exception as error:
        # Settings in the checkpoint's own words may be wrong in any way.
        reason = f"{type(error).__name__}: {error}"
        raise BundleError(f"the bundle's `vision` or `processor` is malformed: {reason}. Export it again.") from error
    vision = manifest.graphs["vision"]
    taken = {spec.name: list(spec.shape) for spec in vision.inputs}
    gives = next(spec.shape[1] for spec in vision.outputs if spec.name == "norms")
    fit = given.keys() == taken.keys() and all(_fits(given[name], taken[name]) for name in taken)
    if not fit or len(counts) > 1 or not _fits([*counts], [gives]):
        raise BundleError(
            f"the bundle's `vision` and `processor` do not fit its vision graph: they give {given} and "
            f"{sorted(counts)} visual tokens, the graph takes {taken} and gives {gives}. Export it again."
        )
    return family


def _fits(shape: list[int], declared: list[Any]) -> bool:
    """Whether a tensor of `shape` may be given where `declared` stands; a name is any size."""
    return len(shape) == len(declared) and all(
        isinstance(wanted, str) or size == wanted for size, wanted in zip(shape, declared, strict=True)
    )
