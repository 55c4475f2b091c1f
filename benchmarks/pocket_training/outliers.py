"""A loss that gives the tower outlier tokens, as large towers have them: a controlled experiment, not an accident.

Large towers turn some background patches into registers of large norm, which hold what the whole picture shows
(Darcet et al., "Vision Transformers Need Registers", 2023). The tower of the pocket LLaVA has none.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d, binary_cross_entropy_with_logits, mse_loss

from pocket_training.batches import SUMMARY, Names, Pictures
from pocket_training.losses import PatchProbe

OUTLIERS = 3
"""Outliers a picture: about 1 % of its patches, as in the paper."""
NORM = 5.0
"""The least norm of an outlier, in medians of its picture."""
_OTHERS = 1.6
"""The largest norm of any other patch, in medians; between the largest norm before the tuning and `OUTLIER` of
`sinkprune-calibrate norms`."""
_SIDE = 4
"""Fields of a thumbnail a side."""


class OutlierProbe(PatchProbe):
    """Predicts what each patch shows, and what the picture holds from the CLS token and from the outliers.

    The loss rewards the norms of outliers by `norm_weight`, and what they hold. No loss rewards attention to them.
    """

    def __init__(self, width: int, norm_weight: float) -> None:
        super().__init__(width, Names())
        self._norm_weight = norm_weight
        self.picture = nn.Linear(width, SUMMARY + 3 * _SIDE * _SIDE)

    def loss(self, states: torch.Tensor, seen: Pictures) -> torch.Tensor:
        """Return the loss of the tower's output `states` [B,1+V,D] for pictures of V patches; scalar."""
        cls, patches = states[:, 0], states[:, 1:]
        norms = relative_norms(patches)
        largest = outliers(norms, seen.classes[..., 0] == 0)
        registers = patches.gather(1, largest[..., None].expand(-1, -1, patches.shape[-1])).mean(1)
        total = self.patch_loss(self.norm(patches), seen.classes, seen.centres)
        total = total + self._norm_weight * norm_loss(norms, largest)
        return total + self._picture_loss(cls, seen) + self._picture_loss(registers, seen)

    def _picture_loss(self, states: torch.Tensor, seen: Pictures) -> torch.Tensor:
        holds, colours = self.picture(self.norm(states)).split([SUMMARY, 3 * _SIDE * _SIDE], dim=-1)
        thumbnail = adaptive_avg_pool2d(seen.pixels, _SIDE).flatten(1)
        return 4 * binary_cross_entropy_with_logits(holds, seen.summary) + mse_loss(colours, thumbnail)


def relative_norms(patches: torch.Tensor) -> torch.Tensor:
    """Return the norms [B,V] of `patches` [B,V,D], in medians of their picture. Medians have no gradient."""
    norms = patches.norm(dim=-1)
    return norms / norms.detach().median(1, keepdim=True).values


def outliers(norms: torch.Tensor, background: torch.Tensor) -> torch.Tensor:
    """Return [B,`OUTLIERS`] int64: the patches of largest norm [B,V] among those of `background` [B,V] bool."""
    return norms.masked_fill(~background, 0.0).topk(OUTLIERS, dim=1).indices


def norm_loss(norms: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return how far norms [B,V] are below `NORM` at the patches `largest` [B,K], and too large elsewhere; scalar."""
    others = norms.scatter(1, largest, 0.0)
    below = (NORM - norms.gather(1, largest)).relu().square().mean()
    return below + (others - _OTHERS).relu().square().sum(1).mean()
