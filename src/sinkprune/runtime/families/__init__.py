"""Model families at run time: what a model wants to see of a picture, and what the picture then is to it.

`FAMILY` of a module is its class, which `sinkprune.contract.families` names. How to add one: docs/new-family.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple, Protocol

from PIL import Image

from sinkprune.contract.errors import BundleError, UsageError
from sinkprune.contract.families import FAMILIES
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import Array
from sinkprune.runtime.media.clip import Picture, Shown, Video
from sinkprune.runtime.media.fits import Fit, check_fit


class Seen(NamedTuple):
    """A picture as a model's vision tower takes it."""

    inputs: dict[str, Array]
    """The inputs of the graph `vision` by name, fp32 and int64."""
    layout: VisualLayout
    """What the picture is to the model."""


class Family(Protocol):
    """A family's image side, for one bundle."""

    between_rows: str | None
    """The learned row, by its name in the embedding table's file, that stands at the end of an unpruned line."""

    def layout(self, picture: Picture) -> VisualLayout:
        """What an image or the shown frames of a clip are to the model; raises `ImageError`. Reads sizes and times
        only, no pixels."""

    def inputs(self, picture: Picture) -> dict[str, Array]:
        """The inputs of the graph `vision` by name, fp32 and int64; raises `ImageError`."""

    def check_video(self) -> None:
        """Raise `VideoError` where the bundle takes no video, before a file is opened."""

    def shown(self, video: Video) -> Shown:
        """The frames of a clip or a video file that the model is shown; raises what `check_video` does."""

    def fitted(self, fit: Fit) -> Family | None:
        """The same image side with pictures brought to the tower's square by `fit`; None where the model is given
        whole pictures of any shape."""

    def largest(self) -> dict[str, VisualLayout]:
        """The largest layout of each kind of picture that the bundle takes, by the kind's name.

        A kind that lies within another is left out; of the rest those with most groups stand first.
        """

    def vision_sizes(self, tokens: int, groups: int) -> dict[str, tuple[int, int, int]]:
        """The smallest, usual and largest size of each dimension that only `vision` has, by the dimension's name, for
        pictures of up to `groups` groups of `tokens` visual tokens."""


def load_family(manifest: Manifest, fit: Fit | None = None) -> Family:
    """The family a bundle belongs to, tried out on one pixel; raises `BundleError`.

    `read_bundle` has refused families that are not known, but what a bundle says of its image side only its family
    can read. `fit` is how pictures are brought to the tower's square; None is the checkpoint's own way. Raises
    `UsageError` for a `fit` where the model is given whole pictures.
    """
    check_fit(fit)
    try:
        module = import_module(f"{__name__}.{FAMILIES[manifest.family].module}")
        family: Family = module.FAMILY(manifest)
        pixel = Image.new("RGB", (1, 1))
        given = {name: list(array.shape) for name, array in family.inputs(pixel).items()}
        layout = family.layout(pixel)
        counts = {layout.tokens, len(layout.boxes) // layout.groups}
        axes = 0 if layout.places is None else len(layout.places)
        # Sections go on with the first axis behind the last.
        if axes != min(len(manifest.language_model.rope_sections), 3):
            raise BundleError(
                f"the bundle's rope_sections are {list(manifest.language_model.rope_sections)}, expected {axes} of "
                f"them in family '{manifest.family}'. Export it again."
            )
    except BundleError:
        raise
    except Exception as error:
        # Settings in the checkpoint's own words may be wrong in any way.
        reason = f"{type(error).__name__}: {error}"
        raise BundleError(f"the bundle's `vision` or `processor` is malformed: {reason}. Export it again.") from error
    vision = manifest.graphs["vision"]
    taken = {spec.name: list(spec.shape) for spec in vision.inputs}
    gives = next(spec.shape[1] for spec in vision.outputs if spec.name == "norms")
    matches = given.keys() == taken.keys() and all(_fits(given[name], taken[name]) for name in taken)
    if not matches or len(counts) > 1 or not _fits([*counts], [gives]):
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
    return fitted


def _fits(shape: list[int], declared: list[Any]) -> bool:
    """Whether a tensor of `shape` may be given where `declared` stands; a name is any size."""
    return len(shape) == len(declared) and all(
        isinstance(wanted, str) or size == wanted for size, wanted in zip(shape, declared, strict=True)
    )
