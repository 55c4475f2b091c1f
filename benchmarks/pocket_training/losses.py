"""The losses of the training: of what each patch shows, of its name, and of the answers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, smooth_l1_loss
from transformers import LlavaForConditionalGeneration

from pocket_training.attention import Reading
from pocket_training.batches import CLASSES, SUMMARY, Pictures, Turns, Words


class Probe(nn.Module):
    """Predicts what each patch shows from its token, and what the picture holds from the CLS token.

    Its loss makes each token represent its own place, and the CLS token attend to all things. The checkpoint does not
    contain it.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.patch = nn.Linear(width, sum(CLASSES) + 2)
        self.picture = nn.Linear(width, SUMMARY)

    def loss(self, states: torch.Tensor, seen: Pictures) -> torch.Tensor:
        """Return the loss of the tower's output `states` [B,1+V,D] for pictures of V patches; scalar."""
        states = self.norm(states)
        *guesses, centres = self.patch(states[:, 1:]).split([*CLASSES, 2], dim=-1)
        shape, _, _, text, _ = seen.classes.unbind(-1)
        asked_of = (shape >= 0, shape > 0, shape > 0, text > 0, shape > 0)
        total = smooth_l1_loss(centres[shape > 0], seen.centres[shape > 0])
        for i, (guess, asked) in enumerate(zip(guesses, asked_of, strict=True)):
            total = total + cross_entropy(guess[asked], seen.classes[asked][:, i])
        return total + 4 * binary_cross_entropy_with_logits(self.picture(states[:, 0]), seen.summary)


def tower_states(model: LlavaForConditionalGeneration, seen: Pictures) -> torch.Tensor:
    """Return [B,1+V,D]: the output of the tower's feature layer, CLS first, computed from the V patches alone."""
    tower = model.model.vision_tower
    embedded = tower.embeddings(seen.pixels)
    places = torch.nn.functional.pad(seen.patches + 1, (1, 0))
    embedded = embedded.gather(1, places[..., None].expand(-1, -1, embedded.shape[-1]))
    return tower.encoder(inputs_embeds=tower.pre_layrnorm(embedded)).last_hidden_state


def naming_loss(
    model: LlavaForConditionalGeneration, visual: torch.Tensor, seen: Pictures, words: Words
) -> torch.Tensor:
    """Return the distance of the projected tokens `visual` [B,V,d] from the words for what they show; scalar.

    Attention compares a word with tokens: "circle" finds circles once their tokens lie near its embedding.
    """
    table = nn.functional.normalize(model.get_input_embeddings().weight, dim=-1)
    # As long as after the decoder's RMSNorm.
    visual = nn.functional.normalize(visual, dim=-1) * visual.shape[-1] ** 0.5
    total = visual.new_zeros(())
    for i, ids in enumerate((words.shapes, words.colours, words.sizes)):
        classes = seen.classes[..., i]
        total = total + cross_entropy(visual[classes > 0] @ table[ids].T, classes[classes > 0] - 1)
    return total


def answer_loss(
    model: LlavaForConditionalGeneration, visual: torch.Tensor, asked: Turns
) -> tuple[torch.Tensor, Reading]:
    """Return the cross entropy of the answers given the projected tokens `visual` [B,V,d], and what was read."""
    embed = model.get_input_embeddings()
    batch = len(visual)
    before = embed(asked.before).expand(batch, -1, -1)
    hidden = torch.cat([before, visual, embed(asked.ids)], 1)

    prefix = before.shape[1] + visual.shape[1]
    turn = nn.functional.pad(asked.turn, (prefix, 0))
    causal = torch.ones(turn.shape[1], turn.shape[1], dtype=torch.bool).tril()
    same = (turn[:, :, None] == turn[:, None, :]) | (turn[:, None, :] == 0)
    position = torch.cat([torch.arange(prefix).expand(batch, -1), prefix + asked.place], 1)
    output = model.model.language_model(
        inputs_embeds=hidden,
        attention_mask=(causal & same)[:, None],
        position_ids=position,
        use_cache=False,
        output_hidden_states=True,
    )
    said = asked.targets >= 0
    answers = cross_entropy(model.lm_head(output.last_hidden_state[:, prefix:][said]), asked.targets[said])
    return answers, Reading(output.hidden_states, position, slice(before.shape[1], prefix))
