"""The pictures of a training step of Qwen3-VL, what their patches show, and the tower that sees them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from pocket_training.batches import Names, patch_targets, show
from pocket_training.decoding import Sight
from pocket_training.qwen_model import MERGE, PATCH
from sinkprune.demo.scenes import SHAPES, UNIT, Scene

VARIED_NAMES = Names((*SHAPES, "plate", "label"))
_EACH = MERGE**2


@dataclass(frozen=True)
class VariedPictures:
    """B pictures of any size, V visual tokens of each, their V * 4 patches, and what these show."""

    pixels: torch.Tensor
    """[B*V*4,1176] fp32, as the checkpoint's image processor gives them."""
    places: torch.Tensor
    """[B*V*4,2] int64: row and column of each patch."""
    taps: torch.Tensor
    """[B*V*4,4] int64: the position embeddings that each patch is between."""
    weights: torch.Tensor
    """[B*V*4,4] fp32: their weights."""
    patch_classes: torch.Tensor
    """[B,V*4,5] int64: `Names.classes` of each patch."""
    centres: torch.Tensor
    """[B,V*4,2] fp32: x and y of the shown thing's centre (`patch_targets`)."""
    classes: torch.Tensor
    """[B,V,5] int64: `Names.classes` of each visual token."""
    extent: torch.Tensor
    """[B] int64: the longer side of each whole picture in visual tokens."""


def varied_pictures(
    scenes: list[tuple[Scene, Image.Image]], shown: int, position_side: int, seed: int = 0
) -> VariedPictures:
    """Return pictures with dense targets and up to `shown` visual tokens of each: centres, then things, then others.

    `position_side` is the side of the tower's table of positions. All pictures get as many tokens as the smallest.
    """
    rng = np.random.default_rng(seed)
    shown = min(shown, *(scene.size[0] * scene.size[1] // UNIT**2 for scene, _ in scenes))
    parts = []
    for scene, picture in scenes:
        columns, rows = (length // UNIT for length in scene.size)
        units = patch_targets(scene, UNIT, VARIED_NAMES)[0]
        kept = show(units, shown, rng)
        fine = (_by_unit(values, rows, columns) for values in patch_targets(scene, PATCH, VARIED_NAMES))
        grid = (values.reshape(rows * columns, _EACH, -1) for values in _grid(rows, columns, position_side))
        taken = [values[kept].reshape(shown * _EACH, -1) for values in (patches(picture), *grid, *fine)]
        parts.append((*taken, units[kept], max(rows, columns)))
    pixels, places, taps, weights, fine_classes, centres, classes, extent = zip(*parts, strict=True)
    flat = [torch.from_numpy(np.concatenate(values)) for values in (pixels, places, taps, weights)]
    stacked = [torch.from_numpy(np.stack(values)) for values in (fine_classes, centres, classes)]
    return VariedPictures(
        pixels=flat[0],
        places=flat[1],
        taps=flat[2],
        weights=flat[3],
        patch_classes=stacked[0],
        centres=stacked[1],
        classes=stacked[2],
        extent=torch.tensor(extent),
    )


def patches(picture: Image.Image) -> np.ndarray:
    """Return [V,4,1176] fp32: the patches of each visual token, equal to the output of the image processor."""
    values = np.asarray(picture, np.float32).transpose(2, 0, 1) / 127.5 - 1
    rows, columns = (length // UNIT for length in values.shape[1:])
    split = values.reshape(3, rows, MERGE, PATCH, columns, MERGE, PATCH).transpose(1, 4, 2, 5, 0, 3, 6)
    # Twice, as two frames that are alike.
    twice = np.repeat(split[:, :, :, :, :, None], 2, axis=5)
    return twice.reshape(rows * columns, _EACH, -1)


def _by_unit(values: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Return [V,4,...] from the values [P,...] of patches in raster order."""
    split = values.reshape(rows, MERGE, columns, MERGE, -1).transpose(0, 2, 1, 3, 4)
    return split.reshape(rows * columns, _EACH, -1)


@cache
def _grid(rows: int, columns: int, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return row and column, and taps and weights of position embeddings, of the patches of a whole picture."""
    grid = torch.tensor([[1, rows * MERGE, columns * MERGE]])
    taps, weights = get_vision_interpolation_indices_and_weights(
        grid, num_grid_per_side=side, mode="bilinear", align_corners=True, spatial_merge_size=MERGE
    )
    return get_vision_position_ids(grid, MERGE).numpy(), taps.numpy(), weights.float().numpy()


def tower_states(model: Any, seen: VariedPictures) -> tuple[torch.Tensor, Sight]:
    """Return the states [B,V*4,D] of the tower's last block, and the visual tokens, from the shown patches alone."""
    tower, (batch, shown) = model.model.visual, seen.classes.shape[:2]
    states = tower.patch_embed(seen.pixels)
    states = states + (tower.pos_embed(seen.taps) * seen.weights[..., None]).sum(1)
    rope = tower.rotary_pos_emb(states, seen.places)
    ends = torch.arange(0, len(states) + 1, shown * _EACH, dtype=torch.int32)
    deepstack: list[torch.Tensor] = []
    for number, block in enumerate(tower.blocks):
        states = block(states, cu_seqlens=ends, position_embeddings=rope)
        if number in tower.deepstack_visual_indexes:
            merger = tower.deepstack_merger_list[len(deepstack)]
            deepstack.append(merger(states).view(batch, shown, -1))
    rows, columns = seen.places.view(batch, shown, _EACH, 2)[:, :, 0].unbind(-1)
    places = torch.stack([torch.zeros_like(rows), rows // MERGE, columns // MERGE])
    tokens = tower.merger(states).view(batch, shown, -1)
    return states.view(batch, shown * _EACH, -1), Sight(tokens, places, seen.extent, tuple(deepstack))
