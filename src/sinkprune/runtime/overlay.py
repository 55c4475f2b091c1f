"""Drawings of an image's visual tokens: sink members, kept tokens, and the tokens that each stage dropped."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sinkprune.contract.errors import UsageError
from sinkprune.contract.precision import Array
from sinkprune.runtime.media.clip import Clip, Picture, SampledFrames
from sinkprune.runtime.media.images import read_image, to_rgb
from sinkprune.runtime.media.video_file import VideoFile
from sinkprune.runtime.steps.answer import Answer, Kept
from sinkprune.runtime.steps.pictures import PictureLike

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")

Colour = tuple[int, int, int]

_SINK: Colour = (213, 24, 40)
_SALIENCE: Colour = (0, 140, 255)
_DIVERSITY: Colour = (20, 200, 70)
_DROPPED: Colour = (16, 16, 20)
_OUTSIDE: Colour = (250, 250, 250)
_UNSEEN: Colour = (60, 60, 66)
# From early to late stages
_STAGES: tuple[Colour, ...] = ((255, 245, 170), (255, 190, 60), (225, 110, 0))

_SHADE = 0.72
_TINT = 0.55
_LONG_SIDE = 1100
_GAP = 12
_ACROSS = 4
_HATCH = 16
"""Pixels between the lines of hatching."""


@dataclass(frozen=True)
class TokenFates:
    """The fate of each of N tokens, as boolean masks [N]."""

    sink: Array
    salience: Array
    diversity: Array
    dropped_after: dict[int, Array]
    """By pruning layer: the tokens that its stage dropped."""
    sink_dropped_after: int | None
    """The layer of the stage that dropped the sink token, if one did."""

    @property
    def kept(self) -> Array:
        """The tokens that the LLM received, without the sink."""
        return self.salience | self.diversity

    @property
    def survived(self) -> Array:
        """The tokens that reached the last layer."""
        alive = self.kept.copy()
        for dropped in self.dropped_after.values():
            alive &= ~dropped
        return alive


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
    sources = (kept.index + np.arange(groups)[:, None] * n).ravel()
    sink_rows = np.tile(np.arange(kept.index.shape[1]) < counts.sink, groups)
    before, dropped_after, sink_dropped_after = alive.ravel(), {}, None
    for layer, rows in kept.after_stage.items():
        after = np.zeros(groups * n, bool)
        after[sources[rows[~sink_rows[rows]]]] = True
        dropped_after[layer] = before & ~after
        before = after
        if counts.sink and sink_dropped_after is None and not sink_rows[rows].any():
            sink_dropped_after = layer
    alive, salience = alive.ravel(), salience.ravel()
    return TokenFates(sink.ravel(), salience & alive, alive & ~salience, dropped_after, sink_dropped_after)


def overlay(answer: Answer, picture: PictureLike | Sequence[PictureLike]) -> Image.Image:
    """Draw the fate of every visual token of an answer, with a legend, as an RGB image.

    `picture` is the picture of the request: a Pillow image, a uint8 [height,width,3] RGB array or a file. For several
    pictures give a list; they are drawn one above the other. For a clip give the frames that the model saw:
    `sinkprune.runtime.steps.pictures.decoded(clip, pipeline.family)`. Raises `ImageError`, and `UsageError` for an
    answer without pruning and for pictures of another number or size.
    """
    pictures: list[PictureLike] = list(picture if isinstance(picture, (list, tuple)) else (picture,))
    if len(pictures) != len(answer.images):
        raise UsageError(f"found {len(pictures)} pictures, the answer is about {len(answer.images)}. Give these.")
    if any(kept.schedule.counts is None for kept in answer.images):
        raise UsageError(
            "the answer ran without pruning, so there is nothing to draw. Choose a budget other than none."
        )
    drawn = []
    for image, kept in zip(map(_drawable, pictures), answer.images, strict=True):
        size = (image.size[0], image.size[1])
        if size != kept.layout.size:
            raise UsageError(
                f"found a picture of {size[0]}x{size[1]} pixels, the answer is about one of "
                f"{kept.layout.size[0]}x{kept.layout.size[1]}. Give the pictures of the request, in their order."
            )
        frames = image.frames if isinstance(image, SampledFrames) else [image] * len(kept.layout.views)
        drawn.append(draw_overlay(frames, answer.method, kept))
    return stacked(drawn)


def _drawable(picture: PictureLike) -> Picture:
    if isinstance(picture, SampledFrames):
        return picture
    if isinstance(picture, (Clip, VideoFile)):
        raise UsageError(
            "an overlay of a clip is drawn on the frames that the model was shown. Give "
            "sinkprune.runtime.steps.pictures.decoded(clip, pipeline.family)."
        )
    return read_image(picture) if isinstance(picture, (str, os.PathLike)) else to_rgb(picture)


def draw_overlay(images: Sequence[Image.Image], method: str, kept: Kept) -> Image.Image:
    """Return a picture with every token's fate drawn on it, and a legend below.

    Views are drawn next to each other, each on one of `images`, which have one size: an image once for each of its
    views, or the frames of a clip. Of frames that share a token, the first is drawn.
    """
    fates, boxes, views = token_fates(kept), kept.layout.boxes, kept.layout.views
    images = images[:: -(-len(images) // len(views))] if len(images) > len(views) else images
    width, height = images[0].size
    scale = (_LONG_SIDE if len(views) <= 2 else _LONG_SIDE / 2) / max(width, height)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    across, right, down = min(len(views), _ACROSS), size[0] + _GAP, size[1] + _GAP
    sheet = Image.new("RGB", (across * right - _GAP, -(-len(views) // across) * down - _GAP), _OUTSIDE)
    places = np.rint(boxes * scale).astype(int)
    for number, (image, view) in enumerate(zip(images, views, strict=True)):
        canvas = np.asarray(image.resize(size, Image.Resampling.LANCZOS), np.float32)
        tinted = _tinted(canvas, places, view, fates)
        if kept.layout.seen_share < 1:
            _hatch_outside(tinted, canvas, places)
        picture = Image.fromarray(tinted.astype(np.uint8))
        _outline(picture, places, view, fates)
        sheet.paste(picture, (number % across * right, number // across * down))
    return _with_legend(sheet, [*_legend(fates, method), *_unshown(kept, images[0].size)])


def stacked(pictures: Sequence[Image.Image]) -> Image.Image:
    """Return one picture with all `pictures`, one above the other."""
    tops = np.cumsum([0, *(picture.height + _GAP for picture in pictures)])
    sheet = Image.new("RGB", (max(picture.width for picture in pictures), int(tops[-1]) - _GAP), _OUTSIDE)
    for picture, top in zip(pictures, tops, strict=False):
        sheet.paste(picture, (0, int(top)))
    return sheet


def picture_bytes(picture: Image.Image, path: Path) -> bytes:
    """Return the bytes of a picture file of the type that the suffix of `path` names."""
    buffer = io.BytesIO()
    picture.save(buffer, format={".png": "PNG", ".webp": "WEBP"}.get(path.suffix.lower(), "JPEG"))
    return buffer.getvalue()


def _tinted(canvas: Array, boxes: Array, view: range, fates: TokenFates) -> Array:
    """Fill the boxes of `view` by their tokens' fates, and pale the picture outside the model's crop."""
    tinted = _mixed(canvas, _OUTSIDE, _SHADE)
    layers = list(fates.dropped_after)
    for token in view:
        left, top, right, bottom = np.clip(boxes[token], 0, None)
        place = (slice(top, bottom), slice(left, right))
        if fates.sink[token]:
            tinted[place] = _mixed(canvas[place], _SINK, _TINT)
        elif fates.kept[token]:
            stage = next((s for s, layer in enumerate(layers) if fates.dropped_after[layer][token]), None)
            colour = None if stage is None else _STAGES[min(stage, len(_STAGES) - 1)]
            tinted[place] = canvas[place] if colour is None else _mixed(canvas[place], colour, _TINT)
        else:
            # Without the picture's own colours, which could pass for those of sink members and stages.
            tinted[place] = _mixed(canvas[place].mean(axis=2, keepdims=True), _DROPPED, _SHADE)
    return tinted


def _hatch_outside(tinted: Array, canvas: Array, boxes: Array) -> None:
    """Darken and hatch, in place, the part outside all `boxes`, which the model does not see."""
    left, top = np.clip(boxes[:, :2].min(axis=0), 0, None)
    right, bottom = boxes[:, 2:].max(axis=0)
    rows, columns = np.indices(canvas.shape[:2])
    unseen = (columns < left) | (columns >= right) | (rows < top) | (rows >= bottom)
    lines = (rows + columns) % _HATCH < 2
    tinted[unseen] = _mixed(canvas[unseen], _UNSEEN, _SHADE)
    tinted[unseen & lines] = _OUTSIDE


def _mixed(pixels: Array, colour: Colour, share: float) -> Array:
    return pixels * (1 - share) + np.array(colour) * share


def _outline(picture: Image.Image, boxes: Array, view: range, fates: TokenFates) -> None:
    draw = ImageDraw.Draw(picture)
    for tokens, colour in ((fates.sink, _SINK), (fates.salience, _SALIENCE), (fates.diversity, _DIVERSITY)):
        for token in filter(tokens.__getitem__, view):
            left, top, right, bottom = boxes[token].tolist()
            # A token of a very wide or tall image may be narrower than its outline.
            corner = (max(left + 1, right - 2), max(top + 1, bottom - 2))
            draw.rectangle((left + 1, top + 1, *corner), outline=colour, width=2)


def _legend(fates: TokenFates, method: str) -> list[tuple[str, Colour, bool]]:
    """Return the lines of the legend: text, colour, and whether the swatch is filled."""
    sink_fate = (
        f", the sink itself until layer {fates.sink_dropped_after}" if fates.sink_dropped_after is not None else ""
    )
    entries = []
    if fates.sink.any():
        entries.append((f"sink members: {fates.sink.sum()} high-norm tokens out{sink_fate}", _SINK, True))
    why = "given to the LLM, no sanitizer" if fates.kept.all() else "kept for salience"
    if fates.salience.any():
        entries.append((f"{why}: {fates.salience.sum()}", _SALIENCE, False))
    if fates.diversity.any():
        # Other methods choose by other measures.
        why = "kept for diversity" if method.startswith("sinkpruner") else f"kept by {method}"
        entries.append((f"{why}: {fates.diversity.sum()}", _DIVERSITY, False))
    dropped = len(fates.sink) - int(fates.sink.sum() + fates.kept.sum())
    entries.append((f"dropped by the sanitizer: {dropped}", _DROPPED, True))
    for stage, (layer, tokens) in enumerate(fates.dropped_after.items()):
        colour = _STAGES[min(stage, len(_STAGES) - 1)]
        entries.append((f"dropped after layer {layer}: {tokens.sum()}", colour, True))
    sink = " and the sink" if fates.sink.any() and fates.sink_dropped_after is None else ""
    entries.append((f"seen by the last layer: {fates.survived.sum()}{sink} (clear)", _OUTSIDE, False))
    return entries


def _unshown(kept: Kept, size: tuple[int, int]) -> list[tuple[str, Colour, bool]]:
    """Return legend lines for parts of the picture without tokens, and for tokens outside the picture."""
    entries, boxes = [], kept.layout.boxes
    if kept.layout.seen_share < 1:
        unseen = 100 - min(99, round(100 * kept.layout.seen_share))
        entries.append((f"not seen by the model (hatched): {unseen} %", _UNSEEN, True))
    bars = ((boxes[:, 2:] <= 0) | (boxes[:, :2] >= size)).any(axis=1).sum()
    if bars:
        entries.append((f"on padding, not drawn: {bars} of all {len(boxes)} tokens", _OUTSIDE, False))
    return entries


def _with_legend(picture: Image.Image, entries: list[tuple[str, Colour, bool]]) -> Image.Image:
    font = ImageFont.load_default(20)
    line, swatch, margin, gap = 32, 20, 14, 10
    half = -(-len(entries) // 2)
    left, right = (
        swatch + gap + 2 * margin + math.ceil(max((font.getlength(text) for text, *_ in column), default=0.0))
        for column in (entries[:half], entries[half:])
    )
    lines = half if left + right <= picture.width else len(entries)
    width = max(picture.width, 420)
    sheet = Image.new("RGB", (width, picture.height + lines * line + 2 * margin), (250, 250, 250))
    sheet.paste(picture, (0, 0))
    draw = ImageDraw.Draw(sheet)
    for number, (text, colour, filled) in enumerate(entries):
        x = margin + (number // lines) * left
        y = picture.height + margin + (number % lines) * line
        outline = colour if colour != _OUTSIDE else (120, 120, 120)
        draw.rectangle((x, y, x + swatch, y + swatch), fill=colour if filled else None, outline=outline, width=3)
        draw.text((x + swatch + gap, y - 3), text, fill=(20, 20, 20), font=font)
    return sheet
