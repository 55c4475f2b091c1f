"""Reading questions about pictures: the decoder on packed turns, and the answers that it predicts.

Each row of text attends to the picture and to its own chunk of text, so attention to other chunks is not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

from pocket_training.batches import Turns


@dataclass(frozen=True)
class Sight:
    """The visual tokens of B pictures as the decoder receives them."""

    tokens: torch.Tensor
    """[B,V,d]."""
    places: torch.Tensor
    """[A,B,V] int64: the position ids on A axes, from the picture's first on."""
    extent: torch.Tensor
    """[B] int64: how far the text after the picture starts from the picture's first position."""
    deepstack: tuple[torch.Tensor, ...] = ()
    """[B,V,d] each: what is added to the visual rows after the decoder's first layers."""


@dataclass(frozen=True)
class Reading:
    """The decoder's input of each layer that was run, and its predictions."""

    hidden: dict[int, torch.Tensor]
    """[B,S,d]: the input of each layer."""
    position: torch.Tensor
    """[B,S], or [A,B,S] for a decoder of several axes."""
    rope: tuple[torch.Tensor, torch.Tensor]
    """[B,S,h] each: cosines and sines of the positions."""
    visual: slice
    """The rows of the picture; text follows."""
    logits: torch.Tensor
    """[n,vocabulary] fp32: the predictions where `Turns.targets` are tokens of answers."""

    def among_all(self, patches: torch.Tensor) -> torch.Tensor:
        """Return [n,S] bool from `patches` [n,V] bool, False for text."""
        behind = self.position.shape[-1] - self.visual.stop
        return pad(patches, (self.visual.start, behind), value=False)


def read(model: Any, sight: Sight, asked: Turns, layers: Sequence[int] | None = None) -> Reading:
    """Run the decoder on pictures and the turns about them. `layers` are those to run, by default all."""
    decoder: Any = model.model.language_model
    embed = model.get_input_embeddings()
    batch, shown = sight.tokens.shape[:2]
    before = embed(asked.before).expand(batch, -1, -1)
    start = before.shape[1]
    hidden = torch.cat([before, sight.tokens.to(before.dtype), embed(asked.ids)], 1)
    position = _positions(start, sight, asked)
    rope = decoder.rotary_emb(hidden, position)

    turn, inputs = asked.turn.unflatten(1, (-1, asked.chunk)), {}
    causal = torch.ones(asked.chunk, asked.chunk, dtype=torch.bool).tril()
    mask = (turn[:, :, :, None] == turn[:, :, None, :]) & causal
    rows_after = asked.ids.shape[1]
    for number in range(len(decoder.layers)) if layers is None else layers:
        inputs[number] = hidden
        hidden = decoder.layers[number](hidden, attention_mask=mask[:, None], position_embeddings=rope)
        if number < len(sight.deepstack):
            hidden = hidden + pad(sight.deepstack[number], (0, 0, start, rows_after))
    said = asked.targets >= 0
    logits = model.lm_head(decoder.norm(hidden[:, start + shown :][said])).float()
    return Reading(inputs, position, rope, slice(start, start + shown), logits)


def answer_loss(reading: Reading, asked: Turns) -> torch.Tensor:
    """Return the cross entropy of the answers; scalar."""
    return cross_entropy(reading.logits, asked.targets[asked.targets >= 0])


def right_turns(reading: Reading, asked: Turns) -> list[list[bool]]:
    """Return for each picture and turn whether greedy decoding gives the answer."""
    said = asked.targets >= 0
    wrong = torch.zeros_like(said)
    wrong[said] = reading.logits.argmax(-1) != asked.targets[said]
    return [
        [not wrong[row, asked.turn[row] == number].any() for number in range(1, int(asked.turn[row].max()) + 1)]
        for row in range(len(said))
    ]


def _positions(start: int, sight: Sight, asked: Turns) -> torch.Tensor:
    axes, batch = sight.places.shape[:2]
    before = torch.arange(start).expand(axes, batch, -1)
    after = (start + sight.extent[:, None] + asked.place).expand(axes, -1, -1)
    position = torch.cat([before, start + sight.places, after], -1)
    return position if axes > 1 else position[0]


def head_norms(attention: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return the norms of queries and keys, which some decoders have."""
    none = nn.Identity()
    return getattr(attention, "q_norm", none), getattr(attention, "k_norm", none)
