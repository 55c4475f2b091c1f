"""A tower that merges tokens, slow and obvious: every place of the grid keeps a row of its own, in the checkpoint's
own layers, and places whose tokens are merged have equal rows. So plain attention counts a token once a place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

Array = np.ndarray[Any, Any]


class MergedTower(NamedTuple):
    """What a merging tower gives of one picture."""

    rows: Array
    """[N,D]: the row of every place, in the last block's output."""
    attention: list[Array]
    """By block, [H,R,N]: the attention of every row to the places, after the row of CLS if there is one."""
    merged: Array
    """[N]: the place of the token that stands for each place."""


@torch.no_grad()
def merged_tower(
    tower: Any, pixels: torch.Tensor, blocks: int, merges: Mapping[int, int], places: Array | None = None
) -> MergedTower:
    """Run the first `blocks` blocks of a CLIP or SigLIP `tower` of transformers on `pixels` [1,3,h,w].

    With `places` [N], the other patches are left out.
    """
    tower.set_attn_implementation("eager")
    x = tower.embeddings(pixels)
    special = int(hasattr(tower, "pre_layrnorm"))
    if places is not None:
        x = torch.cat([x[:, :special], x[:, special + torch.from_numpy(places)]], 1)
    x = tower.pre_layrnorm(x) if special else x
    owner, attention = np.arange(x.shape[1] - special), []
    for block, layer in enumerate(tower.encoder.layers[:blocks]):
        normed = layer.layer_norm1(x)
        own = layer.self_attn
        mixed, weights = own(normed)
        attention.append(weights[0, :, :, special:].numpy())
        x = x + mixed
        if block in merges:
            keys = own.k_proj(normed)[0, special:].unflatten(1, (own.num_heads, -1)).mean(dim=1)
            owner = join(owner, keys.double().numpy(), merges[block])
            for place in np.unique(owner):
                members = special + np.flatnonzero(owner == place)
                x[0, members] = x[0, members].mean(dim=0)
        x = x + layer.mlp(layer.layer_norm2(x))
    return MergedTower(x[0, special:].numpy(), attention, owner)


def join(owner: Array, keys: Array, count: int) -> Array:
    """Return the new `owner` [N] of each place after `count` tokens are merged, by the keys [N,h] of places.

    Every other token, in raster order, looks for its most similar one among the rest. Ties go to the earlier.
    """
    tokens = np.unique(owner).tolist()
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    found = []
    for token in tokens[::2]:
        similar = [round(float(unit[token] @ unit[other]), 5) for other in tokens[1::2]]
        best = int(np.argmax(similar))
        found.append((-similar[best], token, tokens[1::2][best]))
    owner = owner.copy()
    for _, source, target in sorted(found)[:count]:
        owner[owner == source] = target
    return owner
