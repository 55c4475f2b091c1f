"""The checkpoint's own layers in torch, on the full sequence, with dropped tokens masked instead of removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from sinkprune.contract.budgets import Budget, parse_budget
from sinkprune.runtime.steps.answer import Answer
from support.references.reference import largest, sanitize_at, text_attention

Array = np.ndarray[Any, Any]
Asking = Callable[[Array, list[int], list[int]], list[int]]
Choose = Callable[[Array, Array, int], list[int]]
Towers = Several[tuple[Array, Array, Array]]
"""Tokens [N,D], norms and salience [N] of each camera."""


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

    @property
    def cameras(self) -> list[list[int]]:
        """The visual rows of each camera of a policy."""
        return self.images or [self.visual]


@dataclass
class Masked:
    """What the torch model gave on the full sequence."""

    hidden: torch.Tensor
    """[1,S,d] after the last layer."""
    cache: DynamicCache = field(default_factory=DynamicCache)
    """Keys and values of every row."""
    visible: list[torch.Tensor] = field(default_factory=list)
    """[S] bool: the rows that each layer sees."""
    survivors: dict[int, list[int]] = field(default_factory=dict)
    """After each pruning layer: the rows that later layers see."""
    logits: Array = field(default_factory=lambda: np.zeros(0))
    """[S,vocab] of every row."""


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
def masked_forward(model: Any, *given: Any, **options: Any) -> Masked:
    """`masked_layers` of a model of transformers, and its logits."""
    decoder = model.model.language_model
    result = masked_layers(decoder, *given, **options)
    result.logits = model.lm_head(decoder.norm(result.hidden))[0].numpy()
    return result


@torch.no_grad()
def masked_layers(
    decoder: Any,
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
    options = parse_budget(sequence.family, budget)
    prefilled = len(sequence.rows)
    rows = sequence.rows if later is None else np.concatenate([sequence.rows, later])
    visible = torch.ones(len(rows), dtype=torch.bool)
    positions = _positions(sequence, len(rows) - prefilled)
    causal = torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
    if sequence.both_ways:
        causal[:prefilled, :prefilled] = True
    result = Masked(torch.from_numpy(rows)[None])
    for number, layer in enumerate(decoder.layers):
        result.visible.append(visible.clone())
        mask = torch.zeros(causal.shape).masked_fill(~(causal & visible), torch.finfo(torch.float32).min)
        before = result.hidden
        tables = decoder.rotary_emb(before, position_ids=positions[..., None, :])
        hidden = layer(before, attention_mask=mask[None, None], position_embeddings=tables, cache=result.cache)
        result.hidden = hidden
        if sequence.deepstack is not None and number < len(sequence.deepstack):
            hidden[0, sequence.visual] += torch.from_numpy(sequence.deepstack[number])
        if number in stages:
            quota = stages[number]
            result.survivors[number] = surviving(
                options,
                (*queries_and_keys(layer, before, tables), hidden[0].numpy()),
                np.flatnonzero(visible[:prefilled]).tolist(),
                sequence.cameras,
                sequence.text,
                quota if isinstance(quota, list) else [quota] * len(sequence.cameras),
                causal=not sequence.both_ways,
                asking=asking,
                choose=choose,
            )
            visible[:prefilled] = False
            visible[result.survivors[number]] = True
            if options.positions == "compact":
                positions = torch.cumsum(visible, 0) - visible.long()
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
    return model.model.language_model.embed_tokens(torch.tensor(ids, dtype=torch.int64)).numpy()


@torch.no_grad()
def camera_rows(
    towers: Towers,
    budget: Budget | None,
    project: Callable[[torch.Tensor], Iterable[Any]],
    chosen: Iterable[tuple[Array, list[int]]] | None = None,
    first: int = 0,
) -> tuple[list[Any], list[int], list[list[int]], list[list[int]]]:
    """The rows that `project` makes of the tokens that the reference's sanitizer keeps, or of those `chosen`.

    Also their positions, and by camera their places and their tokens. `first` is the place of the first one.
    """
    count, rows, positions = len(towers[0][0]), list[Any](), list[int]()
    cameras, sources = list[list[int]](), list[list[int]]()
    if chosen is None:
        every = list(range(count))
        chosen = [(camera[0], every) if budget is None else sanitize_at(budget, *camera) for camera in towers]
    for number, (kept, index) in enumerate(chosen):
        cameras.append([*range(first + len(rows), first + len(rows) + len(index))])
        rows += [*project(torch.from_numpy(np.array(kept)))]
        positions += [first + number * count + token for token in index]
        sources.append(index)
    return rows, positions, cameras, sources


@torch.no_grad()
def policy_prompt(
    model: Any, towers: Towers, ids: list[int], family: str, budget: str | None
) -> tuple[Sequence, list[list[int]]]:
    """The pictures of a policy's cameras, with the tokens that the sanitizer keeps, and then the prompt's `ids`.

    Also these tokens, by camera. `model` is a PaliGemma of transformers.
    """
    options = None if budget is None else parse_budget(family, budget)
    rows, positions, images, sources = camera_rows(towers, options, model.multi_modal_projector)
    text = [*range(len(rows), len(rows) + len(ids))]
    rows += [*model.language_model.embed_tokens(torch.tensor(ids))]
    positions += [len(towers) * len(towers[0][0]) + place for place in range(len(ids))]
    visual = [row for image in images for row in image]
    places = np.array(positions)
    return Sequence(torch.stack(rows).numpy(), visual, text, places, family, images, both_ways=True), sources
