"""The losses of the training: what each patch shows, what it is called, and what is answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, smooth_l1_loss
from transformers import LlavaForConditionalGeneration
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

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


def naming_loss(
    model: LlavaForConditionalGeneration, visual: torch.Tensor, seen: Pictures, words: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """How far the projected tokens `visual` [B,V,d] are from the words for what they show; scalar.

    `words` are the token ids of shapes, colours and sizes (`training_batches.words`). Attention compares a word with
    what is seen: "circle" finds circles as soon as they lie near its embedding.
    """
    table = nn.functional.normalize(model.get_input_embeddings().weight, dim=-1)
    # As large as the decoder's own norm makes them.
    visual = nn.functional.normalize(visual, dim=-1) * visual.shape[-1] ** 0.5
    total = visual.new_zeros(())
    for i, ids in enumerate(words):
        classes = seen.classes[..., i]
        total = total + cross_entropy(visual[classes > 0] @ table[ids].T, classes[classes > 0] - 1)
    return total


def answer_loss(
    model: LlavaForConditionalGeneration, visual: torch.Tensor, asked: Turns
) -> tuple[torch.Tensor, Reading]:
    """Cross entropy of the answers, given the projected tokens `visual` [B,V,d]; scalar, and how it came about."""
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


@dataclass(frozen=True)
class Reading:
    """What the decoder read."""

    hidden: tuple[torch.Tensor, ...]
    """[B,S,d] into each layer."""
    position: torch.Tensor
    """[B,S]."""
    visual: slice
    """The rows of the picture; text follows."""


def looking_loss(
    model: LlavaForConditionalGeneration,
    reading: Reading,
    asked: Turns,
    seen: Pictures,
    words: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """How little of a question's words' attention goes to what they speak of; scalar.

    Half of the heads of the layers after the first are asked: of "circle" to look at circles, and further on, of
    "red circle", at red circles. Without, a decoder of this size finds things by colour and never by shape.
    """
    decoder = model.model.language_model
    shape, colour = (_class_of(asked.ids, ids) for ids in words[:2])
    before = nn.functional.pad(colour, (1, -1))
    shown, painted = seen.classes[:, None, :, 0], seen.classes[:, None, :, 1]
    by_shape = (shape[..., None] > 0) & (shown == shape[..., None])
    by_colour = (colour[..., None] > 0) & (painted == colour[..., None])
    by_both = by_shape & ((before[..., None] == 0) | (painted == before[..., None]))
    total = reading.hidden[0].new_zeros(())
    for number, wanted in ((1, by_shape | by_colour), (2, by_both | by_colour), (3, by_both | by_colour)):
        row, place = wanted.any(-1).nonzero(as_tuple=True)
        layer, hidden = decoder.layers[number], reading.hidden[number]
        attention = _scores(decoder, layer, hidden, reading, row, place).softmax(-1)
        right = (attention * wanted[row, place, None]).sum(-1)
        total = total - right.clamp(min=1e-6).log().mean()
    return total / 3


def _class_of(ids: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """[B,T]: 1 + which of `words` each token is, 0 for none."""
    equal = ids[..., None] == words
    return torch.where(equal.any(-1), equal.int().argmax(-1) + 1, 0)


def _scores(
    decoder: Any, layer: Any, hidden: torch.Tensor, reading: Reading, row: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """[n,heads/2,V]: attention logits of the text tokens `place` of the pictures `row` over the visual tokens."""
    attention, normed = layer.self_attn, layer.input_layernorm(hidden)
    width = attention.head_dim
    cos, sin = decoder.rotary_emb(hidden, reading.position)
    split = attention.q_proj.out_features // width, width
    queries, keys = (project(normed).unflatten(-1, split) for project in (attention.q_proj, attention.k_proj))
    queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin, unsqueeze_dim=2)
    half = split[0] // 2
    asking = queries[row, reading.visual.stop + place][:, :half]
    return torch.einsum("nhd,nvhd->nhv", asking, keys[row, reading.visual][:, :, :half]) * width**-0.5
