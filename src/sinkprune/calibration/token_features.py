"""The norms and the salience of a picture's tokens in a vision tower."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from sinkprune.contract.precision import Array
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.encoding import run_tower


@dataclass(frozen=True)
class TokenFeatures:
    """Norms and salience of G groups of N tokens, and the place of each on the picture."""

    picture: Image.Image
    """The RGB picture; boxes are in its pixels."""
    boxes: Array
    """[G*N,4] float: left, top, right, bottom of each token."""
    views: tuple[range, ...]
    """Sets of tokens that cover the picture once, for drawing."""
    norms: Array
    """[G,N] fp32: the norm of each token."""
    salience: Array
    """[G,N] fp32: the attention each token receives."""


def bundle_features(pipeline: Pipeline, image: Image.Image) -> TokenFeatures:
    """Return the features of an RGB image in a bundle's tower; raises `ImageError` and `NumericsError`."""
    layout = pipeline.family.layout(image)
    tower = run_tower(pipeline.chain, pipeline.family.inputs(image), Stopwatch(pipeline.backend))
    return TokenFeatures(image, layout.boxes, layout.views, tower.norms, tower.salience)
