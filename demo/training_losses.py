"""The two losses of the training: what each patch shows, and what is answered."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, smooth_l1_loss
from transformers import LlavaForConditionalGeneration

from sinkprune.demo.training_batches import CLASSES, SUMMARY, Pictures, Turns


class Probe(nn.Module):
    """Reads from each patch token what it shows, and from the CLS token what the picture holds.

    It is thrown away after the training. Through it every token is asked to say what is at its own place, and the
    CLS token has to look at what there is.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.patch = nn.Linear(width, sum(CLASSES) + 2)
        self.picture = nn.Linear(width, SUMMARY)

    def loss(self, states: torch.Tensor, seen: Pictures) -> torch.Tensor:
        """Of the tower's output `states` [B,1+V,D], of pictures with V patches each; scalar."""
        states = self.norm(states)
        *guesses, centres = self.patch(states[:, 1:]).split([*CLASSES, 2], dim=-1)
        shape, _, _, text, _ = seen.classes.unbind(-1)
        asked_of = (shape >= 0, shape > 0, shape > 0, text > 0, shape > 0)
        total = smooth_l1_loss(centres[shape > 0], seen.centres[shape > 0])
        for i, (guess, asked) in enumerate(zip(guesses, asked_of, strict=True)):
            total = total + cross_entropy(guess[asked], seen.classes[asked][:, i])
        return total + 4 * binary_cross_entropy_with_logits(self.picture(states[:, 0]), seen.summary)


def tower_states(model: LlavaForConditionalGeneration, seen: Pictures) -> torch.Tensor:
    """[B,1+V,D]: the output of the tower's feature layer, CLS first, where only the V patches `seen` shows exist."""
    tower = model.model.vision_tower
    embedded = tower.embeddings(seen.pixels)
    places = torch.nn.functional.pad(seen.patches + 1, (1, 0))
    embedded = embedded.gather(1, places[..., None].expand(-1, -1, embedded.shape[-1]))
    return tower.encoder(inputs_embeds=tower.pre_layrnorm(embedded)).last_hidden_state


def answer_loss(model: LlavaForConditionalGeneration, tokens: torch.Tensor, asked: Turns) -> torch.Tensor:
    """Cross entropy of the answers, given the visual tokens `tokens` [B,V,D]; scalar."""
    embed = model.get_input_embeddings()
    visual = model.model.multi_modal_projector(tokens)
    batch = len(visual)
    before = embed(asked.before).expand(batch, -1, -1)
    hidden = torch.cat([before, visual, embed(asked.ids)], 1)

    prefix = before.shape[1] + visual.shape[1]
    turn = nn.functional.pad(asked.turn, (prefix, 0))
    causal = torch.ones(turn.shape[1], turn.shape[1], dtype=torch.bool).tril()
    same = (turn[:, :, None] == turn[:, None, :]) | (turn[:, None, :] == 0)
    position = torch.cat([torch.arange(prefix).expand(batch, -1), prefix + asked.place], 1)
    output = model.model.language_model(
        inputs_embeds=hidden, attention_mask=(causal & same)[:, None], position_ids=position, use_cache=False
    ).last_hidden_state[:, prefix:]
    said = asked.targets >= 0
    return cross_entropy(model.lm_head(output[said]), asked.targets[said])
