"""The loss that teaches the decoder's attention where a question's words look, and where its answer looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pocket_training.batches import Turns, Words
from pocket_training.decoding import Reading, head_norms
from sinkprune.demo.scenes import SHAPES


class Lessons(NamedTuple):
    """The layers, and the heads in two halves, that `looking_loss` teaches."""

    alone: tuple[int, ...]
    """Layers in which a word looks at what it names by itself."""
    together: tuple[int, ...]
    """Layers in which words look at what they name together."""
    answer_at_thing: tuple[int, ...]
    answer_at_word: tuple[int, ...]
    first: slice
    """The half of the heads that looks at things."""
    other: slice
    """The half of the heads that counts things, and looks at words."""


def looking_loss(
    model: Any, reading: Reading, asked: Turns, shown: torch.Tensor, words: Words, lessons: Lessons
) -> torch.Tensor:
    """Return the distance of attention from what a question is about; scalar.

    `shown` [B,V,5] are the classes of visual tokens (`batches.Names`). In LLaVA's `lessons`, in the first half of
    the heads "circle" shall look at circles in layer 1, and "red circle" at red circles in 2 and 3. In 4 to 6 the
    answer's first token shall look at what the first such words name. Without this loss a decoder of this size finds
    things by colour and never by shape.

    In the other half words shall divide their attention equally in 2 and 3: between the sequence's first token and
    the centre of each thing that they name. So the share of one reveals their number. In 4 and 5 the answer shall
    look at the word.
    """
    spoken = _Spoken.of(asked, shown, words)
    one, each = _one_of(spoken.together, reading), _each_of(spoken.together, spoken.word, shown, reading)
    taught = (
        *((layer, lessons.first, _one_of(spoken.alone, reading)) for layer in lessons.alone),
        *((layer, lessons.first, one) for layer in lessons.together),
        *((layer, lessons.other, each) for layer in lessons.together),
        *((layer, lessons.first, _answer_at_thing(spoken, reading)) for layer in lessons.answer_at_thing),
        *((layer, lessons.other, _answer_at_word(spoken, reading)) for layer in lessons.answer_at_word),
    )
    losses = [_distance(model, reading, asked, *lesson) for lesson in taught if len(lesson[2].rows)]
    return torch.stack(losses).mean() if losses else reading.hidden[0].new_zeros(())


@dataclass(frozen=True)
class _Spoken:
    """What the words of B texts of T tokens name, on V patches."""

    word: torch.Tensor
    """[B,T] bool: words of a shape or a colour."""
    alone: torch.Tensor
    """[B,T,V] bool: the patches that each word names by itself."""
    together: torch.Tensor
    """[B,T,V] bool: the same, with shapes narrowed by the colour before them."""
    answers: list[tuple[int, int, int]]
    """For each turn that names something: its picture, the first such word, and the answer's first token."""

    @classmethod
    def of(cls, asked: Turns, classes: torch.Tensor, words: Words) -> _Spoken:
        shape = torch.maximum(_class_of(asked.ids, words.shapes), _class_of(asked.ids, words.plurals))
        colour = _class_of(asked.ids, words.colours)
        before, behind = nn.functional.pad(colour, (1, -1)), nn.functional.pad(shape, (-1, 1))
        shown, painted = classes[:, None, :, 0], classes[:, None, :, 1]
        by_shape = (shape[..., None] > 0) & (shown == shape[..., None])
        by_colour = (colour[..., None] > 0) & (painted == colour[..., None])
        # In "red objects", which no plate is.
        by_colour &= (behind[..., None] > 0) | (shown <= len(SHAPES))
        by_both = by_shape & ((before[..., None] == 0) | (painted == before[..., None]))
        named = (shape > 0) | ((colour > 0) & (behind == 0))
        answers = []
        for row, turn in enumerate(asked.turn):
            for number in range(1, int(turn.max()) + 1):
                first = ((turn == number) & named[row]).nonzero()[:1, 0].tolist()
                begin = ((turn == number) & (asked.targets[row] >= 0)).nonzero()[:1, 0].tolist()
                if first and first < begin:
                    answers.append((row, *first, *begin))
        return cls((shape > 0) | (colour > 0), by_shape | by_colour, by_both | by_colour, answers)


class _Lesson(NamedTuple):
    """n tokens of the text, and the tokens of the sequence that they shall look at."""

    rows: torch.Tensor
    """[n]: the picture."""
    places: torch.Tensor
    """[n]: the token of the text."""
    wanted: torch.Tensor
    """[n,S] bool."""
    equally: bool
    """Whether to look at all of them alike, or at any."""


def _one_of(things: torch.Tensor, reading: Reading) -> _Lesson:
    rows, places = things.any(-1).nonzero(as_tuple=True)
    return _Lesson(rows, places, reading.among_all(things[rows, places]), False)


def _each_of(things: torch.Tensor, word: torch.Tensor, shown: torch.Tensor, reading: Reading) -> _Lesson:
    rows, places = word.nonzero(as_tuple=True)
    centres = shown[rows, :, -1] == 1
    wanted = reading.among_all(things[rows, places] & centres)
    wanted[:, 0] = True
    return _Lesson(rows, places, wanted, True)


def _answer_at_thing(spoken: _Spoken, reading: Reading) -> _Lesson:
    rows, words, begins = _columns([a for a in spoken.answers if spoken.together[a[0], a[1]].any()])
    return _Lesson(rows, begins, reading.among_all(spoken.together[rows, words]), False)


def _answer_at_word(spoken: _Spoken, reading: Reading) -> _Lesson:
    rows, words, begins = _columns(spoken.answers)
    wanted = torch.arange(reading.position.shape[-1]) == reading.visual.stop + words[:, None]
    return _Lesson(rows, begins, wanted, False)


def _columns(answers: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, words, begins = torch.tensor(answers, dtype=torch.int64).view(-1, 3).T
    return rows, words, begins


def _distance(model: Any, reading: Reading, asked: Turns, layer: int, heads: slice, lesson: _Lesson) -> torch.Tensor:
    """Return the mean -log of the attention that `heads` of a layer pay to the wanted tokens; scalar."""
    block = model.model.language_model.layers[layer]
    attention, normed = block.self_attn, block.input_layernorm(reading.hidden[layer])
    queries, keys = (
        norm(project(normed).unflatten(-1, (-1, attention.head_dim))[:, :, heads])
        for norm, project in zip(head_norms(attention), (attention.q_proj, attention.k_proj), strict=True)
    )
    queries, keys = apply_rotary_pos_emb(queries, keys, *reading.rope, unsqueeze_dim=2)
    queries = queries[lesson.rows, reading.visual.stop + lesson.places]
    logits = torch.einsum("nhd,nshd->nhs", queries, keys[lesson.rows]).float() * attention.head_dim**-0.5
    turn = asked.turn[lesson.rows]
    read = (turn == turn.gather(1, lesson.places[:, None])) & (torch.arange(turn.shape[1]) <= lesson.places[:, None])
    read = nn.functional.pad(read, (reading.visual.stop, 0), value=True)
    share = logits.masked_fill(~read[:, None], -torch.inf).log_softmax(-1)
    wanted = lesson.wanted[:, None]
    if lesson.equally:
        return -(share.masked_fill(~wanted, 0).sum(-1) / wanted.sum(-1)).mean()
    return -share.masked_fill(~wanted, -torch.inf).logsumexp(-1).mean()


def _class_of(ids: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return [B,T]: 1 + the place of each token in `words`, 0 for other tokens."""
    equal = ids[..., None] == words
    return torch.where(equal.any(-1), equal.int().argmax(-1) + 1, 0)
