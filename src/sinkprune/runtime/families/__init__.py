"""The image side of model families: a picture's layout of tokens, and its inputs of the vision graph.

Families are registered by entry points (`sinkprune.contract.budgets.FAMILIES`). To add one: docs/new-family.md.
"""

from __future__ import annotations

from argparse import _ArgumentGroup
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
from PIL import Image

from sinkprune.contract.budgets import FAMILIES, Share
from sinkprune.contract.checks import format_value
from sinkprune.contract.errors import BundleError, UsageError
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import Array
from sinkprune.contract.registry import load_object
from sinkprune.contract.schedule import VisualLayout
from sinkprune.runtime.media.frame import Picture, SampledFrames, Video
from sinkprune.runtime.media.images import FileFacts

if TYPE_CHECKING:
    from sinkprune.runtime.frames import FrameForm, FrameInputs, FramePlan


class Positions(NamedTuple):
    """The positions of a prompt's rows."""

    rows: Array
    """[S], or [A,S] for positions of A axes."""
    next: int
    """The position of the first new token, the same on every axis."""
    starts: Sequence[int]
    """The position from which the places of each part of a picture count."""


class Rotary:
    """Makes tables of rotary embedding with base `theta` for heads of `head_dim`.

    Without `sections` positions have one axis. In mRoPE they have three, and section i is the number of frequencies
    that rotate with axis i modulo 3 (Qwen2-VL's report, section 2.1).
    """

    def __init__(
        self, theta: float, head_dim: int, dtype: np.dtype[Any], sections: Sequence[int] = (), factor: float = 1.0
    ) -> None:
        """Take the base and the sections; positions are divided by `factor`."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        self._frequencies = (1.0 / np.float32(theta) ** exponents / np.float32(factor)).astype(np.float32)
        sections = sections or (len(exponents),)
        self._axis = np.repeat(np.arange(len(sections)) % 3, sections)
        self._dtype = dtype

    def tables(self, positions: Array) -> tuple[Array, Array]:
        """Return cos and sin [1,S,head_dim/2] for `positions` [S], or [3,S] in mRoPE; angles in fp32.

        Positions [S] are the same on every axis.
        """
        axes = np.broadcast_to(positions, (self._axis.max() + 1, positions.shape[-1]))
        angles = axes.astype(np.float32)[self._axis].T * self._frequencies
        return np.cos(angles)[None].astype(self._dtype), np.sin(angles)[None].astype(self._dtype)


Fit = Literal["crop", "pad", "stretch"]
"""`crop` keeps the middle square and loses the rest. `pad` adds bars of the processor's mean colour around the whole
picture. `stretch` resizes the whole picture without keeping its aspect ratio."""
FITS: tuple[Fit, ...] = get_args(Fit)


def add_fit_option(group: _ArgumentGroup) -> None:
    """Add `--fit`, one of `FITS`, to a group of a command that runs pictures."""
    group.add_argument(
        "--fit",
        choices=FITS,
        help="how a picture becomes the model's square: crop loses the sides, pad adds bars, stretch changes the "
        "aspect ratio (default: the checkpoint's own)",
    )


def check_fit(fit: object) -> None:
    """Raise `UsageError` if `fit` is neither one of `FITS` nor None, the checkpoint's own way."""
    if fit is not None and not (isinstance(fit, str) and fit in FITS):
        raise UsageError(
            f"fit is {format_value(fit)}, expected one of {', '.join(FITS)}, or None for the checkpoint's own."
        )


class TowerInput(NamedTuple):
    """A picture as inputs of a model's vision tower."""

    inputs: dict[str, Array] | FrameInputs
    """The inputs of the graph `vision` by name, as `Family.inputs` returns them, or what the device computes them
    from; none where its output is known."""
    layout: VisualLayout
    """The picture's tokens and their places."""
    file: FileFacts = FileFacts()
    """What notes say of the picture's file."""


class Family(Protocol):
    """A family's image side, for one bundle."""

    between_rows: str | None
    """The name, in the embedding table's file, of the learned row that ends each unpruned line."""

    def layout(self, picture: Picture) -> VisualLayout:
        """Return the tokens and places of an image or of a clip's frames; reads no pixels.

        Raises `ImageError` for all that `inputs` rejects, and for more tokens than the bundle's graphs take.
        """

    def inputs(self, picture: Picture) -> dict[str, Array]:
        """Return the inputs of the graph `vision` by name: floats in the bundle's precision, and int64.

        Raises `ImageError`.
        """

    def frame_form(self) -> FrameForm | None:
        """Return the graph that computes `inputs` where the tower runs; None if the family has none."""
        return None

    def frame_plans(self, size: tuple[int, int]) -> Sequence[FramePlan]:
        """Return how that graph prepares frames of `size` (width, height), part by part; nothing where it cannot.

        Raises `ImageError` as `inputs` does.
        """
        return ()

    def tables(self, picture: Picture) -> dict[str, Array]:
        """Return those of `inputs` that do not depend on pixels; raises `ImageError`."""
        return {}

    def check_video(self) -> None:
        """Raise `VideoError` if the bundle takes no video, before a file is opened."""

    def sample_frames(self, video: Video) -> SampledFrames:
        """Return the frames of a clip or a video file that the model sees; raises `VideoError`."""

    def fitted(self, fit: Fit) -> Family | None:
        """Return the same image side with another `fit`; None if the model sees whole pictures of any shape."""

    def smaller(self, share: Share) -> Family:
        """Return the same image side for pictures made smaller, to this share of their tokens.

        Only plans of bundles whose pictures differ in size ask for it.
        """

    def for_tower(self, graph: str) -> Family:
        """Return the same image side for another form of the tower, a graph; raises `BundleError`."""
        raise BundleError(f"the bundle has a tower '{graph}', which this family has not. Export it again.")

    def largest(self) -> dict[str, VisualLayout]:
        """Return the largest layout of each kind of picture that the bundle takes, by the kind's name.

        A kind within the limits of another is left out. The kind with most groups is first.
        """

    def vision_sizes(self, tokens: int, groups: int) -> dict[str, tuple[int, int, int]]:
        """Return the smallest, usual and largest size of each dimension that only `vision` has, by its name.

        Pictures have up to `groups` groups of `tokens` visual tokens.
        """


# A command lays out its pictures before it loads the bundle.
_last: tuple[Manifest, Fit | None, Family] | None = None


def load_family(manifest: Manifest, fit: Fit | None = None) -> Family:
    """Return the family of a bundle, after a trial with one pixel, which the last bundle needs no second time.

    `fit` turns pictures into the tower's square; None is the checkpoint's own way. `read_bundle` rejects unknown
    families, but only the family itself can check its settings. Raises `BundleError` for wrong settings, and
    `UsageError` for a `fit` where the model sees whole pictures.
    """
    global _last
    check_fit(fit)
    if _last is not None and _last[0] is manifest and _last[1] == fit:
        return _last[2]
    try:
        family: Family = load_object(FAMILIES[manifest.family].runtime)(manifest)
        pixel = Image.new("RGB", (1, 1))
        given = {name: list(array.shape) for name, array in family.inputs(pixel).items()}
        layout = family.layout(pixel)
        counts = {layout.tokens, len(layout.boxes) // layout.groups}
        axes = 0 if layout.places is None else len(layout.places)
        # More than three sections start again with the first axis.
        if axes != min(len(manifest.language_model.rope_sections), 3):
            raise BundleError(
                f"the bundle's rope_sections are {list(manifest.language_model.rope_sections)}, expected {axes} of "
                f"them in family '{manifest.family}'. Export it again."
            )
    except BundleError:
        raise
    except Exception as error:
        # Wrong settings may cause any error.
        reason = f"{type(error).__name__}: {error}"
        raise BundleError(f"the bundle's `vision` or `processor` is malformed: {reason}. Export it again.") from error
    vision = manifest.graphs["vision"]
    taken = {spec.name: list(spec.shape) for spec in vision.inputs}
    gives = next(spec.shape[1] for spec in vision.outputs if spec.name == "norms")
    matches = given.keys() == taken.keys() and all(spec.takes(given[spec.name]) for spec in vision.inputs)
    if not matches or len(counts) > 1 or (not isinstance(gives, str) and counts != {gives}):
        raise BundleError(
            f"the bundle's `vision` and `processor` do not fit its vision graph: they give {given} and "
            f"{sorted(counts)} visual tokens, the graph takes {taken} and gives {gives}. Export it again."
        )
    fitted = family if fit is None else family.fitted(fit)
    if fitted is None:
        raise UsageError(
            f"fit is '{fit}', but models of family '{manifest.family}' see the whole picture already. Leave out fit "
            "(--fit)."
        )
    _last = manifest, fit, fitted
    return fitted
