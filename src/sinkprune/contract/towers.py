"""Facts of vision towers: what `bundle.json` holds below `vision`, written by the export and read by the runtime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from sinkprune.contract.checks.fields import Bounds, Count, Few, Width

Side = Annotated[int, Bounds(1, 1 << 14)]
"""How many pixels, patches or frames something has along one side."""


@dataclass(frozen=True)
class ViTTower:
    """CLIP's vision transformer up to its feature layer, on square crops of one size: LLaVA-1.5 and LLaVA-NeXT."""

    hidden_size: Width
    intermediate_size: Width
    num_heads: Few
    num_blocks: Few
    """Blocks that are computed: up to and with the one whose output is the visual feature."""
    image_size: Side
    """Pixels along a side of the crop."""
    patch_size: Side
    """Pixels along a side of a patch; a patch is a visual token."""
    layer_norm_eps: float
    activation: str
    tokens: Annotated[int, Bounds(1, 1 << 14)]
    """N, the visual tokens of a crop."""

    @property
    def patches_per_token(self) -> int:
        """How many patches are one visual token."""
        return 1


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
    """How many frames of a clip a patch holds."""
    merge_size: Side
    """Patches along a side of a merged token."""
    rope_theta: Annotated[float, Bounds(1, 1e12)]
    out_size: Width
    """Width of the tokens it gives, which is the decoder's."""
    salience_block: Count
    """The 0-based block whose attention is the salience."""
    tokens_per_second: float | None
    """How far positions in time go on in a second of a clip; None where they count frames."""

    @property
    def patches_per_token(self) -> int:
        """How many patches are one visual token."""
        return self.merge_size**2


@dataclass(frozen=True)
class Qwen3Tower(QwenTower):
    """The vision tower of Qwen3-VL: Qwen2-VL's with learned positions, and with features of blocks in between."""

    position_side: Side
    """Learned positions along each side of their square table, which is stretched over every picture."""
    deepstack_blocks: tuple[Count, ...]
    """0-based, ascending: the blocks whose merged output is added to the visual rows behind the decoder's first
    layers (DeepStack), the first block's behind layer 0."""


Tower = ViTTower | QwenTower | Qwen3Tower
"""The facts of any tower; their fields tell which it is."""
