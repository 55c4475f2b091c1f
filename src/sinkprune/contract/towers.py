"""Facts of vision towers, the field `vision` of `bundle.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from sinkprune.contract.checks.fields import Bounds, Count, Few, Width

Side = Annotated[int, Bounds(1, 1 << 14)]
"""A number of pixels, patches or frames along one side."""


@dataclass(frozen=True)
class SquareTower:
    """A vision transformer on pictures of one size."""

    hidden_size: Width
    intermediate_size: Width
    num_heads: Few
    num_blocks: Few
    """The blocks up to the one whose output is the visual feature."""
    image_size: Side
    """Pixels along a side of the picture."""
    patch_size: Side
    """Pixels along a side of a patch; a patch is a visual token."""
    layer_norm_eps: float
    activation: str
    tokens: Annotated[int, Bounds(1, 1 << 14)]
    """N, the visual tokens of a picture."""

    @property
    def patches_per_token(self) -> int:
        """Return the number of patches of one visual token."""
        return 1


@dataclass(frozen=True)
class ViTTower(SquareTower):
    """CLIP's vision transformer up to its feature layer, on square crops: LLaVA-1.5 and LLaVA-NeXT."""


@dataclass(frozen=True)
class SiglipTower(SquareTower):
    """SigLIP's vision transformer without its pooling head: pi0 and llava-interleave. It has no CLS token."""

    salience_block: Count
    """The 0-based block whose attention is the salience."""


@dataclass(frozen=True)
class QwenTower:
    """The vision tower of Qwen2-VL and Qwen2.5-VL: any resolution, `merge_size`**2 patches to a visual token."""

    hidden_size: Width
    intermediate_size: Width
    num_heads: Few
    num_blocks: Few
    full_attention_blocks: tuple[Count, ...]
    """0-based; all others attend within windows."""
    window_side: Annotated[int, Bounds(0, 1 << 10)]
    """Merged tokens along a window's side; 0 where no block has windows."""
    patch_size: Side
    """Pixels along a side of a patch."""
    temporal_patch_size: Side
    """The number of frames of a clip in a patch."""
    merge_size: Side
    """Patches along a side of a merged token."""
    rope_theta: Annotated[float, Bounds(1, 1e12)]
    out_size: Width
    """Width of the output tokens, which is the decoder's."""
    salience_block: Count
    """The 0-based block whose attention is the salience."""
    tokens_per_second: float | None
    """The positions in time of one second of a clip; None if positions count frames."""

    @property
    def patches_per_token(self) -> int:
        """Return the number of patches of one visual token."""
        return self.merge_size**2


@dataclass(frozen=True)
class Qwen3Tower(QwenTower):
    """The vision tower of Qwen3-VL: Qwen2-VL's with learned positions, and with features of blocks in between."""

    position_side: Side
    """Learned positions along each side of their square table, which is interpolated to every picture."""
    deepstack_blocks: tuple[Count, ...]
    """0-based, ascending: the blocks whose merged output is added to the visual rows after the decoder's first layers
    (DeepStack), the first block's after layer 0."""


Tower = ViTTower | QwenTower | Qwen3Tower | SiglipTower
"""The facts of any tower; the fields identify the kind."""
