"""The checkpoint's own layers in torch, on the full sequence, with dropped tokens masked instead of removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from sinkprune.contract.budgets import Budget, parse_budget
from sinkprune.runtime.steps.answer import Answer
from support.references.reference import largest, text_attention

Array = np.ndarray[Any, Any]
Asking = Callable[[Array, list[int], list[int]], list[int]]
Choose = Callable[[Array, Array, int], list[int]]


@dataclass
class Sequence:
    """The rows of a prefill, and which of them are visual and which ask."""

    rows: Array
    visual: list[int]
    text: list[int]
    positions: Array | None = None
    """[S], or [3,S] in mRoPE; 0, 1, 2, ... where None."""
    family: str = "llava"
    images: list[list[int]] | None = None
    """The visual rows of each image; all are of one where None."""
    deepstack: Array | None = None
    """[sets,V,d]: what each of the first layers adds to the visual rows."""
    both_ways: bool = False
    """Whether each row of the prefill sees all rows of it."""


@dataclass
class Masked:
    """What the torch model gave on the full sequence."""

    logits: Array
    """[S,vocab] of every row."""
    survivors: dict[int, list[int]] = field(default_factory=dict)
    """After each pruning layer: the rows that later layers see."""


def every_text_row(hidden: Array, visual: list[int], text: list[int]) -> list[int]:
    return text


def best_rows(scores: Array, hidden: Array, count: int) -> list[int]:
    return largest(scores, min(count, len(scores)))


def surviving(
    budget: Budget,
    layer: tuple[Array, Array, Array],
    alive: list[int],
    images: Iterable[list[int]],
    text: list[int],
    quotas: Iterable[int],
    *,
    causal: bool,
    asking: Asking = every_text_row,
    choose: Choose = best_rows,
) -> list[int]:
    """The rows that a stage leaves of those `alive`, with its quota of the visual rows of each of `images`.

    `layer` are queries [H,S,h], keys [Hkv,S,h] and hidden states [S,d] of all rows; other arguments are as in
    `masked_forward`.
    """
    query, key, hidden = layer[0][:, alive], layer[1][:, alive], layer[2][alive]
    place, images = {row: own for own, row in enumerate(alive)}, [*images]
    visual = [place[row] for image in images for row in image if row in place]
    asked = asking(hidden, visual, [place[row] for row in text])
    over = budget.scores_over == "visual_keys"
    scores = text_attention(query, key, visual, asked, visual_keys=over, causal=causal)
    kept = set(range(len(alive)))
    for image, most in zip(images, quotas, strict=True):
        own = [number for number, at in enumerate(visual) if alive[at] in image]
        chosen = choose(scores[own], hidden[[visual[number] for number in own]], most)
        kept -= {visual[number] for order, number in enumerate(own) if order not in chosen}
    return [alive[at] for at in sorted(kept)]


@torch.no_grad()
def masked_forward(
    model: Any,
    sequence: Sequence,
    budget: str,
    stages: Mapping[int, int | list[int]],
    later: Array | None = None,
    asking: Asking = every_text_row,
    choose: Choose = best_rows,
) -> Masked:
    """Every row through every layer; after a pruning layer the rows dropped there are masked as keys.

    `stages` are the visual rows to keep by pruning layer, of each image where there are several, or a function that
    counts them from the scores of an image's rows; the reference chooses them from this model's own queries and
    keys. `later` are rows behind the prefill, which no stage touches.
    `asking` names the rows that score, from the hidden states [S,d] behind the layer and the visual and text rows;
    all are places among the survivors. `choose` gives the places of an image's rows that survive, from their scores,
    hidden states and quota.
    """
    llama = model.model.language_model
    options = parse_budget(sequence.family, budget)
    prefilled = len(sequence.rows)
    rows = sequence.rows if later is None else np.concatenate([sequence.rows, later])
    hidden = torch.from_numpy(rows)[None]
    visible = torch.ones(len(rows), dtype=torch.bool)
    positions = _positions(sequence, len(rows) - prefilled)
    causal = torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
    if sequence.both_ways:
        causal[:prefilled, :prefilled] = True
    result = Masked(np.zeros(0))
    for number, layer in enumerate(llama.layers):
        mask = torch.zeros(causal.shape).masked_fill(~(causal & visible), torch.finfo(torch.float32).min)
        tables = llama.rotary_emb(hidden, position_ids=positions[..., None, :])
        before = hidden
        hidden = layer(hidden, attention_mask=mask[None, None], position_embeddings=tables)
        if sequence.deepstack is not None and number < len(sequence.deepstack):
            hidden[0, sequence.visual] += torch.from_numpy(sequence.deepstack[number])
        if number in stages:
            query, key = queries_and_keys(layer, before, tables)
            images = [sequence.visual] if sequence.images is None else sequence.images
            quota = stages[number]
            result.survivors[number] = surviving(
                options,
                (query, key, hidden[0].numpy()),
                np.flatnonzero(visible[:prefilled]).tolist(),
                images,
                sequence.text,
                quota if isinstance(quota, list) else [quota] * len(images),
                causal=not sequence.both_ways,
                asking=asking,
                choose=choose,
            )
            visible[:prefilled] = False
            visible[result.survivors[number]] = True
            if options.positions == "compact":
                positions = torch.cumsum(visible, 0) - visible.long()
    result.logits = model.lm_head(llama.norm(hidden))[0].numpy()
    return result


def assert_equals_masked(
    answer: Answer, logits: Array, sequence: Sequence, masked: Masked, stop: Iterable[int]
) -> None:
    """That an answer, and the `logits` [tokens,vocab] of its tokens, are what the masked full sequence gives.

    No `stop` token is allowed in it.
    """
    assert_survivors(answer, sequence, masked)
    expected = masked.logits[len(sequence.rows) - 1 :]
    assert np.abs(logits - expected).max() < 1e-3
    assert answer.token_ids == likeliest(expected, stop)


def likeliest(logits: Array, stop: Iterable[int]) -> list[int]:
    """The likeliest token of each row of `logits` [tokens,vocab] that does not `stop` the answer."""
    allowed = logits.copy()
    allowed[:, [*stop]] = -np.inf
    return list(map(int, allowed.argmax(axis=1)))


def assert_survivors(answer: Answer, sequence: Sequence, masked: Masked) -> None:
    """That the stages of an answer left those visual rows that the masked full sequence still sees."""
    number = {row: place for place, row in enumerate(sequence.visual)}
    assert {layer: kept.tolist() for layer, kept in answer.kept.after_stage.items()} == {
        layer: sorted(number[row] for row in kept if row in number) for layer, kept in masked.survivors.items()
    }


def _positions(sequence: Sequence, later: int) -> torch.Tensor:
    """[S], or [3,S], with `later` rows that go on behind the last."""
    if sequence.positions is None:
        return torch.arange(len(sequence.rows) + later)
    end = int(sequence.positions.max()) + 1
    behind = np.broadcast_to(np.arange(end, end + later), (*sequence.positions.shape[:-1], later))
    return torch.from_numpy(np.concatenate([sequence.positions, behind], axis=-1))


def queries_and_keys(layer: Any, hidden: torch.Tensor, tables: Any) -> tuple[Array, Array]:
    """A layer's queries [H,S,h] and keys [Hkv,S,h] after rotary embedding."""
    normed, attention = layer.input_layernorm(hidden), layer.self_attn

    def heads(which: str) -> torch.Tensor:
        x = getattr(attention, f"{which}_proj")(normed)
        x = x.view(1, x.shape[1], -1, attention.head_dim)
        return getattr(attention, f"{which}_norm", torch.nn.Identity())(x).transpose(1, 2)

    query, key = apply_rotary_pos_emb(heads("q"), heads("k"), *tables)
    return query[0].numpy(), key[0].numpy()


@torch.no_grad()
def embedded(model: Any, ids: list[int]) -> Array:
    """Rows of the embedding table."""
    rows: Array = model.model.language_model.embed_tokens(torch.tensor(ids, dtype=torch.int64)).numpy()
    return rows
