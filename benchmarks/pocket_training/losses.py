"""The losses of the training for the tower: of what each patch shows, and of its name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, smooth_l1_loss
from transformers import LlavaForConditionalGeneration

from pocket_training.batches import SUMMARY, Names, Pictures, Words


class PatchProbe(nn.Module):
    """Predicts what each patch shows from its state. The checkpoint does not contain it.

    Its loss makes each state represent its own place.
    """

    def __init__(self, width: int, names: Names) -> None:
        super().__init__()
        self._classes = names.classes
        self.norm = nn.LayerNorm(width)
        self.patch = nn.Linear(width, sum(names.classes) + 2)

    def patch_loss(self, states: torch.Tensor, classes: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
        """Return the loss of normed `states` [B,V,D] for `classes` [B,V,5] and `centres` [B,V,2]; scalar."""
        *guesses, places = self.patch(states).float().split([*self._classes, 2], dim=-1)
        shape, _, _, text, _ = classes.unbind(-1)
        asked_of = (shape >= 0, shape > 0, shape > 0, text > 0, shape > 0)
        total = smooth_l1_loss(places[shape > 0], centres[shape > 0])
        for i, (guess, asked) in enumerate(zip(guesses, asked_of, strict=True)):
            total = total + cross_entropy(guess[asked], classes[asked][:, i])
        return total


class Probe(PatchProbe):
    """Predicts what the picture holds from the CLS token too, which makes that token attend to all things."""

    def __init__(self, width: int) -> None:
        super().__init__(width, Names())
        self.picture = nn.Linear(width, SUMMARY)

    def loss(self, states: torch.Tensor, seen: Pictures) -> torch.Tensor:
        """Return the loss of the tower's output `states` [B,1+V,D] for pictures of V patches; scalar."""
        states = self.norm(states)
        total = self.patch_loss(states[:, 1:], seen.classes, seen.centres)
        return total + 4 * binary_cross_entropy_with_logits(self.picture(states[:, 0]), seen.summary)


def tower_states(model: LlavaForConditionalGeneration, seen: Pictures) -> torch.Tensor:
    """Return [B,1+V,D]: the output of the tower's feature layer, CLS first, computed from the V patches alone."""
    tower = model.model.vision_tower
    embedded = tower.embeddings(seen.pixels)
    places = torch.nn.functional.pad(seen.patches + 1, (1, 0))
    embedded = embedded.gather(1, places[..., None].expand(-1, -1, embedded.shape[-1]))
    return tower.encoder(inputs_embeds=tower.pre_layrnorm(embedded)).last_hidden_state


def naming_loss(model: Any, visual: torch.Tensor, shown: torch.Tensor, words: Words) -> torch.Tensor:
    """Return the distance of visual tokens [B,V,d] from the words for what they show; scalar.

    `shown` [B,V,5] are their classes. Attention compares a word with tokens: "circle" finds circles once their tokens
    lie near its embedding.
    """
    table = nn.functional.normalize(model.get_input_embeddings().weight, dim=-1)
    # As long as after the decoder's RMSNorm.
    visual = nn.functional.normalize(visual.float(), dim=-1) * visual.shape[-1] ** 0.5
    total = visual.new_zeros(())
    for i, ids in enumerate((words.shapes, words.colours, words.sizes)):
        classes = shown[..., i]
        total = total + cross_entropy((visual[classes > 0] @ table[ids].T).float(), classes[classes > 0] - 1)
    return total
