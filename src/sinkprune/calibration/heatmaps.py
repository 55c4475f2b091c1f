"""Heat maps of the norms and the received attention of a picture's tokens, next to the picture."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from sinkprune.calibration.sink_tokens import sink_tokens
from sinkprune.calibration.token_features import TokenFeatures
from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.command_line.written_files import note_written
from sinkprune.contract.files.output_files import make_folder, write_whole
from sinkprune.contract.precision import Array
from sinkprune.runtime.profiling.plot import figure_bytes, import_matplotlib

_SIDE = 3.6
"""Inches of a panel's longer side."""
_NARROWEST = 2.4
_OPAQUE = 0.75
_SINK_COLOUR = "#D55E00"
_TICKS = 5
_DECADES = 1e3
"""The range of the attention's scale: few tokens receive most of the attention."""


class HeatmapFolder:
    """Writes heat maps into a folder, until one cannot be written: what is measured meanwhile is kept."""

    def __init__(self, folder: Path) -> None:
        """Make `folder`; raises `OutputError`."""
        self._made = not folder.exists()
        make_folder(folder)
        self.folder = folder
        self._refused: Exception | None = None

    def draw(self, file: Path, features: TokenFeatures, title: str) -> None:
        """Write the heat maps of a picture to `file` in the folder, unless an earlier one could not be written."""
        if self._refused is None:
            try:
                write_whole(file, draw_heatmaps(features, title))
            except Exception as error:
                self._refused = error

    def end(self) -> None:
        """Print a line about the folder; or raise the error of a heat map, and leave no empty folder."""
        if self._refused is None:
            note_written(self.folder)
            return
        self.remove_empty()
        raise self._refused

    def remove_empty(self) -> None:
        """Remove the folder if it was made here and no heat map was drawn."""
        if self._made:
            with suppress(OSError):
                self.folder.rmdir()


def draw_heatmaps(features: TokenFeatures, title: str) -> bytes:
    """Return the bytes of a PNG: the picture, norms in medians of their group, and salience in means of its group.

    Each view has a line of three panels. The scale of salience is logarithmic. Outlines mark sink tokens in both
    maps. Raises `UsageError` without matplotlib.
    """
    figure_of = import_matplotlib()
    from matplotlib.colors import LogNorm, Normalize

    norms = features.norms / np.median(features.norms, axis=1, keepdims=True)
    salience = features.salience / features.salience.mean(axis=1, keepdims=True)
    low, top, most = float(norms.min()), float(norms.max()), float(salience.max())
    faint = max(float(salience.min()), most / _DECADES)
    maps = {
        "norm, in its group's medians": (norms, Normalize(low, top), np.linspace(low, top, _TICKS)),
        "attention received, in its group's means": (
            salience,
            LogNorm(faint, most),
            np.geomspace(faint, most, _TICKS),
        ),
    }
    sinks, views = sink_tokens(features.norms).ravel(), features.views
    width, height = (_SIDE * size / max(features.picture.size) for size in features.picture.size)
    figure = figure_of(figsize=(3 * max(width, _NARROWEST) + 1.8, len(views) * height + 0.6), layout="constrained")
    panels = figure.subplots(len(views), 3, squeeze=False)
    panels[0, 0].set_title("picture", fontsize=9)
    for line, view in zip(panels, views, strict=True):
        for axes in line:
            axes.imshow(features.picture, extent=(0, features.picture.width, features.picture.height, 0))
            axes.set_axis_off()
        for axes, (name, (values, scale, ticks)) in zip(line[1:], maps.items(), strict=True):
            shades = _draw(axes, features.boxes[view], values.ravel()[view], sinks[view], scale)
            figure.colorbar(shades, ax=axes, shrink=0.85, ticks=ticks, format="%.3g").minorticks_off()
            if view == views[0]:
                axes.set_title(name, fontsize=9)
    heading = f"{_drawable(title)}; outlined: the {int(sinks.sum())} of largest norm"
    figure.suptitle(heading, fontsize=9, parse_math=False)
    return figure_bytes(figure, ".png")


def _drawable(text: str) -> str:
    """Escape the characters of a file's name that matplotlib's own font lacks."""
    return escaped(text).encode("latin-1", "backslashreplace").decode("latin-1")


def _draw(axes: Any, boxes: Array, values: Array, sinks: Array, scale: Any) -> Any:
    """Shade each box [V,4] by its value [V], and outline sink tokens."""
    from matplotlib.collections import PolyCollection

    left, top, right, bottom = boxes.T
    corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)
    shades = PolyCollection([*corners], array=values, norm=scale, cmap="viridis", alpha=_OPAQUE, linewidths=0)
    axes.add_collection(shades, autolim=False)
    outlines = PolyCollection([*corners[sinks]], facecolors="none", edgecolors=_SINK_COLOUR, linewidths=1.4)
    axes.add_collection(outlines, autolim=False)
    return shades
