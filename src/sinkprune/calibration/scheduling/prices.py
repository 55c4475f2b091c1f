"""What plans of a space cost: milliseconds on a machine, or visual tokens a layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sinkprune.contract.costs.model import Costs
from sinkprune.contract.precision import Array


@dataclass(frozen=True)
class Milliseconds:
    """A request about a picture, to its last token: `sinkprune.contract.costs.model.predict` for many plans."""

    costs: Costs
    layers: tuple[int, ...]
    """The decoder layers of each segment."""
    text: int
    """Text tokens of the prompt."""
    tokens: int
    """Visual tokens of the picture."""
    projector: bool
    """Whether there is one."""
    new_tokens: int

    def __call__(self, sanitizer: int, rows: Array, stages: tuple[int, ...]) -> Array:
        costs, all_rows = self.costs, self.text + rows
        total = costs.tower.ms(self.tokens) + costs.rest + costs.sanitizer.ms(rows[:, 0])
        if self.projector:
            total = total + costs.projector.ms(rows[:, 0])
        for segment, curve in enumerate(costs.decoders):
            total = total + curve.ms(all_rows[:, segment])
        for stage in stages:
            total = total + costs.select.ms(all_rows[:, stage])
        mean = all_rows @ np.array(self.layers) / sum(self.layers)
        return total + (self.new_tokens - 1) * costs.token.ms(mean)


@dataclass(frozen=True)
class MeanTokens:
    """Visual tokens a decoder layer runs on, mean over layers."""

    layers: tuple[int, ...]
    """The decoder layers of each segment."""

    def __call__(self, sanitizer: int, rows: Array, stages: tuple[int, ...]) -> Array:
        mean: Array = rows @ np.array(self.layers) / sum(self.layers)
        return mean
