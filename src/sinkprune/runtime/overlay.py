"""Drawings of an image's visual tokens: sink members, kept tokens, and the tokens that each stage dropped."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sinkprune.contract.checks.arguments import check_type, checks_options
from sinkprune.contract.checks.format_value import counted
from sinkprune.contract.errors import UsageError
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.precision import Array
from sinkprune.runtime.acting.observation import Cameras, camera_key
from sinkprune.runtime.acting.report import ActionReport
from sinkprune.runtime.media.clip import Clip, SampledFrames
from sinkprune.runtime.media.images import ImageBytes, read_image, to_rgb
from sinkprune.runtime.media.video_file import VideoBytes, VideoFile
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.kept import Kept
from sinkprune.runtime.steps.pictures import PictureLike
from sinkprune.runtime.token_map import Colour, TokenClass, token_map

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")

_OUTSIDE: Colour = (250, 250, 250)

_PALE = 0.72
"""How much of `_OUTSIDE` covers what no token covers."""
_LONG_SIDE = 1100
_GAP = 12
_ACROSS = 4
_HATCH = 16
"""Pixels between the lines of hatching."""


@checks_options
def overlay(answer: Answer | ActionReport, picture: PictureLike | Cameras) -> Image.Image:
    """Draw the fate of every visual token of an answer, or of a chunk of actions, with a legend, as an RGB image.

    `picture` is the picture of the request: a Pillow image, a uint8 [height,width,3] RGB array, a file, a `Clip` or a
    `VideoFile`. For several pictures give a list; they are drawn one above the other. For a chunk give the cameras as
    `Policy.act` took them, in a list or by name; None, a camera without a frame, is left out. A clip is drawn on the
    frames that the model saw. Raises `ImageError`, `VideoError`, and `UsageError` for an answer without pruning and
    for pictures of another number or size, and `TypeError` for an `answer` that is none.
    """
    expected = "an Answer, as generate returns it, or an ActionReport, as act returns it"
    check_type("answer", answer, (Answer, ActionReport), expected)
    if isinstance(picture, Mapping):
        by_key = {camera_key(name): frame for name, frame in picture.items()}
        names = (isinstance(answer, ActionReport) and answer.camera_names) or ()
        given: Sequence[PictureLike | None] = [by_key.get(camera_key(name)) for name in names]
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
    return stacked(drawn)


def _shown(picture: PictureLike, layout: VisualLayout) -> list[Image.Image]:
    """Return what the views of `layout` are drawn on: frames of a clip, or an image once for each view."""
    if isinstance(picture, SampledFrames):
        return picture.frames
    if isinstance(picture, ImageBytes):
        return _shown(picture.decoded(), layout)
    if isinstance(picture, VideoBytes):
        with picture.opened() as video:
            return _shown(video, layout)
    if isinstance(picture, (Clip, VideoFile)):
        seen = layout.frame_indices
        if not seen or picture.count <= seen[-1]:
            expected = f"a clip of more than {seen[-1]} frames" if seen else "an image"
            raise UsageError(
                f"found a clip of {counted(picture.count, 'frame')}, the answer is about {expected}. Give the "
                "pictures of the request, in their order."
            )
        return picture.read(seen)
    image = read_image(picture) if isinstance(picture, (str, os.PathLike)) else to_rgb(picture)
    return [image] * len(layout.views)


def draw_overlay(images: Sequence[Image.Image], method: str, kept: Kept) -> Image.Image:
    """Return a picture with every token's fate drawn on it, and a legend below.

    Views are drawn next to each other, each on one of `images`, which have one size: an image once for each of its
    views, or the frames of a clip. Of frames that share a token, the first is drawn.
    """
    tokens, views = token_map(method, kept), kept.layout.views
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
    return _with_legend(sheet, tokens.classes)


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
            below = canvas[place].mean(axis=2, keepdims=True) if each.grey else canvas[place]
            tinted[place] = _mixed(below, each.colour, each.fill)
    return tinted


def _hatch_outside(tinted: Array, canvas: Array, seen: Sequence[float], unseen: TokenClass) -> None:
    """Darken and hatch, in place, the part outside the box `seen`."""
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
            draw.rectangle((left + 1, top + 1, *corner), outline=each.colour, width=2)


def _with_legend(picture: Image.Image, classes: Sequence[TokenClass]) -> Image.Image:
    font = ImageFont.load_default(20)
    line, swatch, margin, gap = 32, 20, 14, 10
    half = -(-len(classes) // 2)
    left, right = (
        swatch + gap + 2 * margin + math.ceil(max((font.getlength(each.text) for each in column), default=0.0))
        for column in (classes[:half], classes[half:])
    )
    lines = half if left + right <= picture.width else len(classes)
    width = max(picture.width, left, right)
    sheet = Image.new("RGB", (width, picture.height + lines * line + 2 * margin), (250, 250, 250))
    sheet.paste(picture, (0, 0))
    draw = ImageDraw.Draw(sheet)
    for number, each in enumerate(classes):
        x = margin + (number // lines) * left
        y = picture.height + margin + (number % lines) * line
        fill = each.colour if each.fill else None
        draw.rectangle((x, y, x + swatch, y + swatch), fill=fill, outline=each.colour, width=3)
        draw.text((x + swatch + gap, y - 3), each.text, fill=(20, 20, 20), font=font)
    return sheet
