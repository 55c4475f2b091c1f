"""What became of each visual token of a picture, in classes of tokens that are drawn alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sinkprune.contract.checks.format_value import counted
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.plans import AVERAGING
from sinkprune.contract.precision import Array
from sinkprune.runtime.steps.kept import Kept

Colour = tuple[int, int, int]

_SINK: Colour = (213, 24, 40)
_SALIENCE: Colour = (0, 140, 255)
_DIVERSITY: Colour = (20, 200, 70)
_DROPPED: Colour = (16, 16, 20)
_AVERAGED: Colour = (84, 84, 92)
_CLEAR: Colour = (120, 120, 120)
_UNSEEN: Colour = (60, 60, 66)
# From early to late stages
_STAGES: tuple[Colour, ...] = ((255, 245, 170), (255, 190, 60), (225, 110, 0))

_SHADE = 0.72
_PALE = 0.3
_TINT = 0.55


@dataclass(frozen=True)
class TokenFates:
    """The fate of each of N tokens, as boolean masks [N]."""

    sink: Array
    salience: Array
    diversity: Array
    kept: Array
    """The tokens that the LLM received, without the sink."""
    survived: Array
    """The tokens that reached the last layer."""
    dropped_after: dict[int, Array]
    """By pruning layer: the tokens that its stage dropped."""
    sink_dropped_after: int | None
    """The layer of the stage that dropped the sink token, if one did."""


def token_fates(kept: Kept) -> TokenFates:
    """Return the fates of all G*N tokens of a pruned picture, from the selection of the graphs."""
    (groups, n), counts = kept.norms.shape, kept.schedule.counts
    if counts is None:
        raise ValueError("an unpruned run has nothing to draw")
    sink, salience, alive = (np.zeros((groups, n), bool) for _ in range(3))
    by_norm = np.argsort(-kept.norms, axis=1, kind="stable")
    np.put_along_axis(sink, by_norm[:, : counts.outliers], True, axis=1)
    by_salience = np.argsort(np.where(sink, np.inf, -kept.salience), axis=1, kind="stable")
    np.put_along_axis(salience, by_salience[:, : counts.reserve], True, axis=1)
    np.put_along_axis(alive, kept.index[:, counts.sink :], True, axis=1)
    sources = kept.tokens
    sink_rows = np.tile(np.arange(kept.index.shape[1]) < counts.sink, groups)
    before, dropped_after, sink_dropped_after = alive.ravel(), {}, None
    for layer, rows in kept.after_stage.items():
        after = np.zeros(groups * n, bool)
        after[sources[rows[~sink_rows[rows]]]] = True
        dropped_after[layer] = before & ~after
        before = after
        if counts.sink and sink_dropped_after is None and not sink_rows[rows].any():
            sink_dropped_after = layer
    kept_all, salience = alive.ravel(), salience.ravel() & alive.ravel()
    return TokenFates(
        sink.ravel(), salience, kept_all & ~salience, kept_all, before, dropped_after, sink_dropped_after
    )


@dataclass(frozen=True, eq=False)
class TokenClass:
    """Tokens of one fate, and how they are drawn. One class fills a token's box, and another may outline it."""

    name: str
    """`sink`, `salience`, `diversity`, `averaged`, `sanitizer`, `stage` or `last_layer`; or `unseen` and `padding`,
    for parts of the picture without tokens and for tokens outside the picture."""
    text: str
    """The line of the legend, with the number of tokens."""
    colour: Colour
    tokens: Array
    """[C] int64: the numbers of the tokens, ascending; empty for `unseen`."""
    fill: float | None = None
    """The share of the colour in the tokens' boxes: 0 leaves the picture clear. None if the class fills no boxes."""
    grey: bool = False
    """Whether the picture is grey below the colour."""
    outlined: bool = False
    stage: int = 0
    """The step that decides the class: 0 for the sanitizer, and the numbers of the stages from 1 on."""
    layer: int | None = None
    """For a `stage`, the 0-based decoder layer that it follows."""


@dataclass(frozen=True, eq=False)
class TokenMap:
    """The visual tokens of a picture: their places, and their classes in the order of the legend."""

    size: tuple[int, int]
    """Width and height of the picture, in pixels."""
    seen: tuple[float, float, float, float]
    """Left, top, right and bottom of the part that the model sees, in pixels of the picture."""
    boxes: Array
    """[G*N,4] float: left, top, right, bottom of each token, in pixels of the picture."""
    views: tuple[range, ...]
    """The tokens that cover each frame or image once."""
    classes: tuple[TokenClass, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the map as JSON: tokens by their numbers, boxes in hundredths of a pixel, colours as #rrggbb."""
        return {
            "size": [*self.size],
            "seen": [*self.seen],
            "boxes": np.round(self.boxes, 2).tolist(),
            "views": [[view.start, view.stop] for view in self.views],
            "classes": [
                {**vars(each), "colour": "#" + bytes(each.colour).hex(), "tokens": each.tokens.tolist()}
                for each in self.classes
            ],
        }


def token_map(method: str, kept: Kept) -> TokenMap:
    """Return the map of a picture's tokens, after an answer by `method`. Unpruned, all are in class `last_layer`."""
    layout = kept.layout
    if kept.schedule.counts is None:
        rows = np.unique(layout.unpruned_rows[layout.unpruned_rows >= 0])
        text = f"not pruned: {len(rows)} tokens in every layer (clear)"
        classes = [TokenClass("last_layer", text, _CLEAR, rows, fill=0.0)]
    else:
        classes = _pruned(kept, method)
    return TokenMap(layout.size, _seen(layout), layout.boxes, layout.views, (*classes, *_unshown(layout)))


def _pruned(kept: Kept, method: str) -> list[TokenClass]:
    """Return the classes of a pruned picture's tokens."""
    fates, until, counts = token_fates(kept), None, kept.schedule.counts
    sinks = kept.schedule.groups * counts.sink if counts else 0
    sink, salience, diversity = map(np.flatnonzero, (fates.sink, fates.salience, fates.diversity))
    classes = []
    text = f"sink members: {counted(len(sink), 'high-norm token')} dropped"
    if sinks:
        until = fates.sink_dropped_after
        text = f"{counted(sinks, 'sink')}: average of {counted(len(sink), 'high-norm token')}"
        text += f", until layer {until}" if until is not None else ""
    if len(sink):
        classes.append(TokenClass("sink", text, _SINK, sink, fill=_TINT, outlined=True))
    if len(salience):
        why = "given to the LLM, no sanitizer" if fates.kept.all() else "kept for salience"
        classes.append(TokenClass("salience", f"{why}: {len(salience)}", _SALIENCE, salience, outlined=True))
    if len(diversity):
        # Other methods choose by other measures.
        why = "kept for diversity" if method.startswith("sinkpruner") else f"kept by {method}"
        classes.append(TokenClass("diversity", f"{why}: {len(diversity)}", _DIVERSITY, diversity, outlined=True))
    dropped = np.flatnonzero(~fates.sink & ~fates.kept)
    # Grey, because the picture's own colours could pass for those of sink members and stages.
    if method in AVERAGING and len(diversity) and len(dropped):
        text = f"averaged into outlined tokens: {len(dropped)}"
        classes.append(TokenClass("averaged", text, _AVERAGED, dropped, fill=_PALE, grey=True))
    else:
        text = f"dropped by the sanitizer: {len(dropped)}"
        classes.append(TokenClass("sanitizer", text, _DROPPED, dropped, fill=_SHADE, grey=True))
    for stage, (layer, mask) in enumerate(fates.dropped_after.items(), 1):
        tokens, colour = np.flatnonzero(mask), _STAGES[min(stage, len(_STAGES)) - 1]
        text = f"dropped after layer {layer}: {len(tokens)}"
        classes.append(TokenClass("stage", text, colour, tokens, fill=_TINT, stage=stage, layer=layer))
    survived = np.flatnonzero(fates.survived)
    and_sink = " and the sink" if sinks and until is None else ""
    text = f"seen by the last layer: {len(survived)}{and_sink} (clear)"
    return [*classes, TokenClass("last_layer", text, _CLEAR, survived, fill=0.0)]


def _unshown(layout: VisualLayout) -> list[TokenClass]:
    """Return the classes of parts of the picture without tokens, and of tokens outside the picture."""
    classes, boxes = [], layout.boxes
    if layout.seen_share < 1:
        unseen = 100 - min(99, round(100 * layout.seen_share))
        text = f"not seen by the model (hatched): {unseen} %"
        classes.append(TokenClass("unseen", text, _UNSEEN, np.zeros(0, np.int64), fill=_SHADE))
    bars = np.flatnonzero(((boxes[:, 2:] <= 0) | (boxes[:, :2] >= layout.size)).any(axis=1))
    if len(bars):
        text = f"on padding, not drawn: {len(bars)} of all {len(boxes)} tokens"
        classes.append(TokenClass("padding", text, _CLEAR, bars))
    return classes


def _seen(layout: VisualLayout) -> tuple[float, float, float, float]:
    """Return the part of the picture that tokens cover; the whole picture unless the model sees only a part."""
    width, height = map(float, layout.size)
    if layout.seen_share >= 1:
        return 0.0, 0.0, width, height
    left, top = np.clip(layout.boxes[:, :2].min(axis=0), 0, None).tolist()
    right, bottom = np.clip(layout.boxes[:, 2:].max(axis=0), None, layout.size).tolist()
    return left, top, right, bottom
