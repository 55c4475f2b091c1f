"""Pictures of the visual tokens that each layer kept."""

from __future__ import annotations

import io
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sinkprune.contract.checks import checks_options, counted, escaped, format_value
from sinkprune.contract.errors import UsageError
from sinkprune.contract.policy_facts import CAMERA_PREFIX
from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import VisualLayout
from sinkprune.runtime.media.frame import Frame, SampledFrames, UnopenedPicture, Video, as_image
from sinkprune.runtime.media.images import read_image, to_rgb
from sinkprune.runtime.steps.decoding import Kept
from sinkprune.runtime.steps.pictures import PictureLike

Colour = tuple[int, int, int]

_SINK: Colour = (213, 24, 40)
_LAST: Colour = (20, 200, 70)
_DROPPED: Colour = (16, 16, 20)
_AVERAGED: Colour = (84, 84, 92)
_CLEAR: Colour = (120, 120, 120)
_UNSEEN: Colour = (60, 60, 66)
# From early to late stages
_STAGES: tuple[Colour, ...] = ((255, 245, 170), (255, 190, 60), (225, 110, 0))


AVERAGING = frozenset({"downsample", "downsample-ttft", "visionzip", "visionzip+filter", "vscan"})
"""The methods whose sanitizer averages the tokens that it does not keep into tokens that it keeps.

All other methods drop such tokens. Outliers are apart: `Counts.sink` says whether a plan averages them. The methods
are known by name, because a bundle's plans do not say this.
"""
_SHADE = 0.72
_AVERAGED_FILL = 0.3
_TINT = 0.75


@dataclass(frozen=True)
class TokenFates:
    """The fate of each of N tokens, as boolean masks [N]."""

    sink: Array
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
    sink, alive = (np.zeros((groups, n), bool) for _ in range(2))
    each = np.broadcast_to(np.arange(n), (groups, n))
    # A token that was merged into another has its fate.
    merged = each if kept.merged is None else kept.merged
    by_norm = np.argsort(np.where(merged == each, -kept.norms, np.inf), axis=1, kind="stable")
    np.put_along_axis(sink, by_norm[:, : counts.outliers], True, axis=1)
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
    fate = (merged + n * np.arange(groups)[:, None]).ravel()
    return TokenFates(
        sink.ravel()[fate],
        alive.ravel()[fate],
        before[fate],
        {layer: dropped[fate] for layer, dropped in dropped_after.items()},
        sink_dropped_after,
    )


@dataclass(frozen=True, eq=False)
class TokenClass:
    """Tokens of one fate, and how they are drawn. Each token has one class, and some are also on `padding`."""

    name: str
    """`sink`, `sanitizer`, `averaged`, `stage` or `last_layer`; or `unseen` and `padding`, for parts of the picture
    without tokens and for tokens outside the picture."""
    text: str
    """The line of the legend, with the number of tokens."""
    colour: Colour
    tokens: Array
    """[C] int64: the numbers of the tokens, ascending; empty for `unseen`."""
    fill: float | None = None
    """The share of the colour in the tokens' boxes. The picture is grey below it, because its own colours could pass
    for those of classes. 0 leaves the picture clear. None if the class fills no boxes."""
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
    fates, counts, classes = token_fates(kept), kept.schedule.counts, []
    sinks, until = kept.schedule.groups * counts.sink if counts else 0, fates.sink_dropped_after
    members, survived = np.flatnonzero(fates.sink), np.flatnonzero(fates.survived)
    if len(members):
        end = "the end" if until is None else f"layer {until}"
        text = f"outliers, in {counted(sinks, 'sink')} to {end}" if sinks else "dropped as outliers"
        classes.append(TokenClass("sink", f"{text}: {len(members)}", _SINK, members, fill=_TINT))
    dropped = np.flatnonzero(~fates.sink & ~fates.kept)
    if method in AVERAGING and counts and kept.index.shape[1] > counts.sink + counts.reserve and len(dropped):
        text = f"averaged into kept tokens: {len(dropped)}"
        classes.append(TokenClass("averaged", text, _AVERAGED, dropped, fill=_AVERAGED_FILL))
    else:
        text = f"dropped by the sanitizer: {len(dropped)}"
        classes.append(TokenClass("sanitizer", text, _DROPPED, dropped, fill=_SHADE))
    for stage, (layer, mask) in enumerate(fates.dropped_after.items(), 1):
        tokens, colour = np.flatnonzero(mask), _STAGES[min(stage, len(_STAGES)) - 1]
        text = f"dropped after layer {layer}: {len(tokens)}"
        classes.append(TokenClass("stage", text, colour, tokens, fill=_TINT, stage=stage, layer=layer))
    and_sink = f" and {counted(sinks, 'sink')}" if sinks and until is None else ""
    text = f"kept to the last layer: {len(survived)}{and_sink}"
    return [*classes, TokenClass("last_layer", text, _LAST, survived, fill=0.0, outlined=True)]


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


_OUTSIDE: Colour = (250, 250, 250)
_INK: Colour = (20, 20, 20)
_FONT = 26

_PALE = 0.72
"""How much of `_OUTSIDE` covers what no token covers."""
_LONG_SIDE = 1100
_GAP = 12
_ACROSS = 4
_HATCH = 16
"""Pixels between the lines of hatching."""


class Drawable(Protocol):
    """An answer, or a chunk of actions."""

    @property
    def method(self) -> str:
        """The method that pruned."""

    @property
    def budget(self) -> str:
        """The budget that ran."""

    @property
    def visual_tokens(self) -> int:
        """Visual tokens of all pictures before anything is dropped."""

    @property
    def tokens_per_layer(self) -> list[int]:
        """Visual tokens that each decoder layer ran on."""

    @property
    def images(self) -> Sequence[Kept]:
        """What each step kept of each picture's tokens."""


@checks_options
def overlay(
    answer: Drawable,
    picture: PictureLike | Sequence[PictureLike | None] | Mapping[str, PictureLike | None],
    question: str = "",
) -> Image.Image:
    """Draw the fate of every visual token of an answer, or of a chunk of actions, with a legend, as an RGB image.

    The question, the answer, the budget and its numbers of tokens are written above. `question` is the prompt of the
    request, or the instruction of the chunk.
    `picture` is the picture of the request: a Pillow image, a uint8 [height,width,3] RGB array, a file, a `Clip` or a
    `VideoFile`. For several pictures give a list; they are drawn one above the other. For a chunk give the cameras as
    `Policy.act` took them, in a list or by name; None, a camera without a frame, is left out. A clip is drawn on the
    frames that the model saw. Raises `ImageError`, `VideoError`, and `UsageError` for an answer without pruning and
    for pictures of another number or size, and `TypeError` for an `answer` that is none.
    """
    if not isinstance(getattr(answer, "images", None), tuple):
        raise TypeError(
            f"answer is {format_value(answer)}, expected an Answer, as generate returns it, or an ActionReport, as "
            "act returns it."
        )
    if isinstance(picture, Mapping):
        # A chunk of actions names its cameras, with or without LeRobot's prefix.
        names = getattr(answer, "camera_names", None) or ()
        by_name = {str(name).removeprefix(CAMERA_PREFIX): frame for name, frame in picture.items()}
        given: Sequence[PictureLike | None] = [by_name.get(name.removeprefix(CAMERA_PREFIX)) for name in names]
    else:
        given = picture if isinstance(picture, (list, tuple)) else (picture,)
    pictures: list[PictureLike] = [each for each in given if each is not None]
    if len(pictures) != len(answer.images):
        found = counted(len(pictures), "picture")
        raise UsageError(f"found {found}, the answer is about {len(answer.images)}. Give these.")
    if not pictures:
        raise UsageError("the answer is about no picture, so there is nothing to draw. Give one about a picture.")
    if any(kept.schedule.counts is None for kept in answer.images):
        raise UsageError(
            "the answer ran without pruning, so there is nothing to draw. Choose a budget other than none."
        )
    drawn = []
    for image, kept in zip(pictures, answer.images, strict=True):
        shown = _shown(image, kept.layout)
        (width, height), expected_size = shown[0].size, kept.layout.size
        if (width, height) != expected_size:
            raise UsageError(
                f"found a picture of {width}x{height} pixels, the answer is about one of {expected_size[0]}x"
                f"{expected_size[1]}. Give the pictures of the request, in their order."
            )
        drawn.append(draw_overlay(shown, answer.method, kept))
    sheet = stacked(drawn)
    text = getattr(answer, "text", None)
    asked = [f"{'instruction' if text is None else 'question'}: {question}"] if question else []
    lines = [*asked, *([] if text is None else [f"answer: {text}"]), counts_line(answer)]
    return stacked([with_lines(Image.new("RGB", (sheet.width, 0)), lines), sheet])


def counts_line(answer: Drawable) -> str:
    """Return the budget that ran, and how many visual tokens it left."""
    first, last = answer.tokens_per_layer[0], answer.tokens_per_layer[-1]
    numbers = f"picture {answer.visual_tokens}, into the LLM {first}, last layer {last}"
    return f"budget: {answer.budget}; visual tokens: {numbers}"


def _shown(picture: PictureLike, layout: VisualLayout) -> list[Image.Image]:
    """Return what the views of `layout` are drawn on: frames of a clip, or an image once for each view."""
    if isinstance(picture, SampledFrames):
        return picture.frames
    if isinstance(picture, UnopenedPicture):
        with picture.opened() as media:
            return _shown(media, layout)
    if isinstance(picture, Video):
        seen = layout.frame_indices
        if not seen or picture.count <= seen[-1]:
            expected = f"a clip of more than {seen[-1]} frames" if seen else "an image"
            raise UsageError(
                f"found a clip of {counted(picture.count, 'frame')}, the answer is about {expected}. Give the "
                "pictures of the request, in their order."
            )
        return picture.read(seen)
    if isinstance(picture, Frame):
        return [as_image(picture)] * len(layout.views)
    image = read_image(picture) if isinstance(picture, (str, os.PathLike)) else to_rgb(picture)
    return [image] * len(layout.views)


def draw_overlay(images: Sequence[Image.Image], method: str, kept: Kept) -> Image.Image:
    """Return a picture with every token's fate drawn on it, and a legend below."""
    tokens = token_map(method, kept)
    return with_legend(draw_tokens(images, tokens), tokens.classes)


def draw_tokens(images: Sequence[Image.Image], tokens: TokenMap) -> Image.Image:
    """Return a picture with the class of every token drawn on it.

    Views are drawn next to each other, each on one of `images`, which have one size: an image once for each of its
    views, or the frames of a clip. Of frames that share a token, the first is drawn.
    """
    views = tokens.views
    images = images[:: -(-len(images) // len(views))] if len(images) > len(views) else images
    width, height = images[0].size
    scale = (_LONG_SIDE if len(views) <= 2 else _LONG_SIDE / 2) / max(width, height)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    across, right, down = min(len(views), _ACROSS), size[0] + _GAP, size[1] + _GAP
    sheet = Image.new("RGB", (across * right - _GAP, -(-len(views) // across) * down - _GAP), _OUTSIDE)
    places = np.rint(tokens.boxes * scale).astype(int)
    for number, (image, view) in enumerate(zip(images, views, strict=True)):
        canvas = np.asarray(image.resize(size, Image.Resampling.LANCZOS), np.float32)
        tinted = _tinted(canvas, places, view, tokens.classes)
        for hatched in (each for each in tokens.classes if each.name == "unseen"):
            _hatch_outside(tinted, canvas, np.rint(np.array(tokens.seen) * scale).tolist(), hatched)
        picture = Image.fromarray(tinted.astype(np.uint8))
        _outline(picture, places, view, tokens.classes)
        sheet.paste(picture, (number % across * right, number // across * down))
    return sheet


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


def _tinted(canvas: Array, places: Array, view: range, classes: Sequence[TokenClass]) -> Array:
    """Fill the boxes of `view` by their tokens' classes, and pale the picture outside the boxes."""
    tinted = _mixed(canvas, _OUTSIDE, _PALE)
    for each in classes:
        if each.fill is None:
            continue
        for token in filter(view.__contains__, each.tokens.tolist()):
            left, top, right, bottom = np.clip(places[token], 0, None)
            place = (slice(top, bottom), slice(left, right))
            below = canvas[place].mean(axis=2, keepdims=True) if each.fill else canvas[place]
            tinted[place] = _mixed(below, each.colour, each.fill)
    return tinted


def _hatch_outside(tinted: Array, canvas: Array, seen: Sequence[float], unseen: TokenClass) -> None:
    left, top, right, bottom = seen
    rows, columns = np.indices(canvas.shape[:2])
    outside = (columns < left) | (columns >= right) | (rows < top) | (rows >= bottom)
    lines = (rows + columns) % _HATCH < 2
    tinted[outside] = _mixed(canvas[outside], unseen.colour, unseen.fill or 0.0)
    tinted[outside & lines] = _OUTSIDE


def _mixed(pixels: Array, colour: Colour, share: float) -> Array:
    return pixels * (1 - share) + np.array(colour) * share


def _outline(picture: Image.Image, places: Array, view: range, classes: Sequence[TokenClass]) -> None:
    draw = ImageDraw.Draw(picture)
    for each in classes:
        for token in filter(view.__contains__, each.tokens.tolist() if each.outlined else ()):
            left, top, right, bottom = places[token].tolist()
            # A token of a very wide or tall image may be narrower than its outline.
            corner = (max(left + 1, right - 2), max(top + 1, bottom - 2))
            draw.rectangle((left + 1, top + 1, *corner), outline=each.colour, width=4)


def with_lines(picture: Image.Image, lines: Sequence[str]) -> Image.Image:
    """Return a picture with lines of text below it. Long lines are wrapped, and cut off after three lines."""
    font, height, margin = ImageFont.load_default(_FONT), 36, 14
    # The font has no other characters.
    texts = []
    for text in (escaped(line).encode("latin-1", "backslashreplace").decode("latin-1") for line in lines):
        most = int((picture.width - 2 * margin) * len(text) / font.getlength(text))
        texts += textwrap.wrap(text, max(20, most), max_lines=3, placeholder=" ...")
    width = max(picture.width, *(math.ceil(font.getlength(text)) + 2 * margin for text in texts))
    sheet = Image.new("RGB", (width, picture.height + len(texts) * height + margin), _OUTSIDE)
    sheet.paste(picture, (0, 0))
    for number, text in enumerate(texts):
        place = (margin, picture.height + margin // 2 + number * height)
        ImageDraw.Draw(sheet).text(place, text, fill=_INK, font=font)
    return sheet


def with_legend(picture: Image.Image, classes: Sequence[TokenClass]) -> Image.Image:
    """Return a picture with a line for each class below it."""
    font = ImageFont.load_default(_FONT)
    line, swatch, margin, gap = 38, 24, 14, 10
    half = -(-len(classes) // 2)
    left, right = (
        swatch + gap + 2 * margin + math.ceil(max((font.getlength(each.text) for each in column), default=0.0))
        for column in (classes[:half], classes[half:])
    )
    lines = half if left + right <= picture.width else len(classes)
    width = max(picture.width, left, right)
    sheet = Image.new("RGB", (width, picture.height + lines * line + 2 * margin), _OUTSIDE)
    sheet.paste(picture, (0, 0))
    draw = ImageDraw.Draw(sheet)
    for number, each in enumerate(classes):
        x = margin + (number // lines) * left
        y = picture.height + margin + (number % lines) * line
        fill = each.colour if each.fill else None
        draw.rectangle((x, y, x + swatch, y + swatch), fill=fill, outline=each.colour, width=3)
        draw.text((x + swatch + gap, y - 3), each.text, fill=_INK, font=font)
    return sheet
