"""Plots of evaluations, norms, attention and quantisation, and heat maps of pictures.

Functions named `plot_` return the bytes of a picture file with the given suffix, e.g. ".png". All raise `UsageError`
if matplotlib is missing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sinkprune.calibration.attention import AttentionReport, RunMeans
from sinkprune.calibration.evaluation.replies import EvaluationReport
from sinkprune.calibration.evaluation.statistics import FEW_QUESTIONS, Mean
from sinkprune.calibration.norms import OUTLIER, NormReport, TokenFeatures, sink_tokens
from sinkprune.contract.checks import counted, escaped
from sinkprune.contract.command_line.options import note_written
from sinkprune.contract.files.output_files import make_folder, write_whole
from sinkprune.contract.precision import Array
from sinkprune.runtime.profiling.plot import figure_bytes, import_matplotlib

if TYPE_CHECKING:
    from sinkprune.calibration.quantising.quantise import QuantisationReport

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
    # Matplotlib's own font lacks most characters.
    drawable = escaped(title).encode("latin-1", "backslashreplace").decode("latin-1")
    heading = f"{drawable}; outlined: the {int(sinks.sum())} of largest norm"
    figure.suptitle(heading, fontsize=9, parse_math=False)
    return figure_bytes(figure, ".png")


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


OWN = "sinkpruner"
"""The project's own method, which is drawn boldly."""
# Okabe-Ito without vermilion, the colour of SinkPruner, and without yellow, which is too pale for lines.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#CC79A7", "#777777")
_OWN_COLOUR = "#D55E00"
# With the colours above, 36 methods look different.
_STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ("--", "x"), (":", "v"))
# Methods have the same number of tokens at a budget, so their points are drawn side by side.
_SIDE_STEP = 0.012


def _new_figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    """Return a figure, in inches, and the axes of its columns."""
    figure = import_matplotlib()(figsize=(width, height), layout="constrained")
    panels = figure.subplots(1, columns, squeeze=False)[0]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def plot_evaluation(report: EvaluationReport, suffix: str) -> bytes:
    """Draw accuracy against visual tokens: a line for each method, a band for the unpruned engines."""
    figure, (axes,) = _new_figure(11, 6.4)
    low, high = report.none.ci95
    axes.axhspan(100 * low, 100 * high, color="#000000", alpha=0.07, linewidth=0)
    axes.axhline(100 * report.none.accuracy, color="#000000", linewidth=1, label="none (unpruned)")
    looks, others = _looks(list(report.methods)), [method for method in report.methods if method != OWN]
    side_steps = {method: 1 + _SIDE_STEP * (place - (len(others) - 1) / 2) for place, method in enumerate(others)}
    for method, budgets in report.methods.items():
        points = sorted(budgets.values(), key=lambda point: point.mean_visual_tokens)
        tokens = [point.mean_visual_tokens * side_steps.get(method, 1.0) for point in points]
        accuracies = [100 * point.accuracy for point in points]
        reach = [[100 * abs(point.ci95[end] - point.accuracy) for point in points] for end in (0, 1)]
        width = looks[method]["linewidth"] * 0.6
        axes.errorbar(tokens, accuracies, yerr=reach, elinewidth=width, label=method, **looks[method])
    _label(axes, report)
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    return figure_bytes(figure, suffix)


def plot_norms(report: NormReport, suffix: str) -> bytes:
    """Draw a histogram of the norms with a logarithmic count, which shows one token in a thousand."""
    figure, (axes,) = _new_figure(8, 4.2)
    axes.stairs(report.histogram, report.edges, fill=True, color="#0072B2")
    axes.set_yscale("log")
    axes.axvline(OUTLIER, color="#D55E00", linestyle="--", label=f"outlier: {OUTLIER:g} medians")
    axes.set_xlabel("norm of a visual token, in its picture's median norms")
    axes.set_ylabel(f"tokens, of {report.tokens}")
    axes.set_title("\n".join(textwrap.wrap(f"{report.model}: {report.verdict}", 95)), fontsize=9, loc="left")
    axes.legend(frameon=False)
    return figure_bytes(figure, suffix)


def plot_quantisation(report: QuantisationReport, suffix: str) -> bytes:
    figure, (axes,) = _new_figure(11, 4.6)
    places = range(len(report.layers))
    nearest = [100 * layer.to_nearest for layer in report.layers]
    axes.plot(places, nearest, "o", color="#777777", markersize=3, label="to the nearest")
    ours = [100 * layer.error for layer in report.layers]
    axes.plot(places, ours, "o", color=_OWN_COLOUR, markersize=4, label="calibrated")
    first = {layer.graph: place for place, layer in reversed(list(enumerate(report.layers)))}
    for number, (graph, place) in enumerate(first.items()):
        axes.axvline(place - 0.5, color="#000000", linewidth=0.5, alpha=0.3)
        # Names alternate between two lines, because a projector has few layers and a long name.
        axes.text(place - 0.3, 1.01 + 0.05 * (number % 2), graph, transform=axes.get_xaxis_transform(), fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("linear layers, in the order in which they run")
    axes.set_ylabel("error of the output, % of its length")
    axes.grid(axis="y", alpha=0.25)
    off, off_nearest = (f"{100 * error.relative_l2:.1f} %" for error in (report.logits, report.to_nearest))
    errors = f"logits {off} off, {off_nearest} to the nearest"
    axes.set_title(f"{report.model}, weights {report.weights.name}: {errors}", fontsize=10, pad=34)
    axes.legend(frameon=False)
    return figure_bytes(figure, suffix)


def plot_attention(report: AttentionReport, suffix: str) -> bytes:
    """Draw the sink tokens among the kept ones, and the entropy of the text's attention at each prune layer."""
    runs = {"none": report.none}
    runs |= {
        f"{method} {budget}": run for method, budgets in report.methods.items() for budget, run in budgets.items()
    }
    figure, (shares, entropies) = _new_figure(13, 2.2 + 0.32 * len(runs), 2)
    _draw_shares(shares, runs)
    _draw_entropies(entropies, runs)
    figure.suptitle(
        f"{report.model}, {report.weights.beside(report.precision)}, {report.backend}: {report.task}, "
        f"{counted(report.questions, 'question')} about {counted(report.pictures, 'picture')}, 95 % intervals",
        fontsize=10,
        parse_math=False,
    )
    return figure_bytes(figure, suffix)


def _draw_shares(axes: Any, runs: dict[str, RunMeans]) -> None:
    for place, run in enumerate(runs.values()):
        axes.barh(place, 100 * run.sink_share.mean, color=_OWN_COLOUR if place else "#777777", height=0.6)
        axes.errorbar(100 * run.sink_share.mean, place, xerr=_reach(run.sink_share, 100), color="#000000")
        label = "as many, by salience alone" if place == 0 else None
        axes.plot(100 * run.salience_alone.mean, place, "D", color="#0072B2", markersize=5, label=label)
    axes.set_yticks(range(len(runs)), labels=list(runs), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("% of the tokens into the LLM that are sink tokens")
    axes.legend(frameon=False, fontsize=8)


def _draw_entropies(axes: Any, runs: dict[str, RunMeans]) -> None:
    """Draw the entropies of each run layer by layer, with a mark for a uniform attention."""
    layers = list(next(iter(runs.values())).layers)
    for number, layer in enumerate(layers):
        colour, shift = _COLOURS[number % len(_COLOURS)], 0.12 * (number - (len(layers) - 1) / 2)
        for place, run in enumerate(runs.values()):
            own = run.layers[layer]
            label = f"layer {layer}" if place == 0 else None
            reach = _reach(own.entropy, 1)
            axes.errorbar(own.entropy.mean, place + shift, xerr=reach, fmt="o", color=colour, label=label)
            axes.plot(own.uniform, place + shift, "|", color=colour, markersize=9)
    axes.set_yticks(range(len(runs)), labels=[""] * len(runs))
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("entropy of the text's attention on visual tokens, nats (|: of a uniform one)")
    axes.grid(axis="x", alpha=0.25)
    axes.legend(frameon=False, fontsize=8)


def _reach(value: Mean, scale: float) -> list[list[float]]:
    low, high = value.ci95 or (value.mean, value.mean)
    return [[scale * (value.mean - low)], [scale * (high - value.mean)]]


def _looks(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the style of each method: SinkPruner bold, its variants in its colour, others in other colours."""
    own, others = cycle(product(_STYLES, [_OWN_COLOUR])), cycle(product(_STYLES, _COLOURS))
    looks: dict[str, dict[str, Any]] = {}
    for method in methods:
        if method == OWN:
            looks[OWN] = {"color": _OWN_COLOUR, "marker": "o", "linewidth": 3, "markersize": 8, "zorder": 10}
            continue
        (linestyle, marker), colour = next(own if method.startswith(f"{OWN}-") else others)
        looks[method] = {"color": colour, "linestyle": linestyle, "marker": marker}
        looks[method] |= {"linewidth": 1.2, "markersize": 4, "alpha": 0.85}
    return looks


def _label(axes: Any, report: EvaluationReport) -> None:
    axes.set_xscale("log")
    tokens = {point.mean_visual_tokens for budgets in report.methods.values() for point in budgets.values()}
    ticks: list[float] = []
    for count in sorted(tokens):
        # Closer labels would overlap on a logarithmic axis.
        if not ticks or count > 1.12 * ticks[-1]:
            ticks.append(count)
    axes.set_xticks(ticks, labels=[f"{count:.0f}" for count in ticks])
    axes.minorticks_off()
    axes.set_xlabel(
        f"visual tokens, mean over layers and questions ({report.none.mean_visual_tokens:.0f} unpruned); "
        "points of one budget stand side by side"
    )
    axes.set_ylabel("accuracy, %, with 95 % interval")
    axes.grid(axis="y", alpha=0.25)
    blind = ", pictures greyed out" if report.blind else ""
    few = " (small sample)" if report.questions < FEW_QUESTIONS else ""
    questions = f"{counted(report.questions, 'question')}{blind}{few}"
    axes.set_title(
        f"{report.model}, {report.weights.beside(report.precision)}, {report.backend}: {report.task}, {questions}",
        fontsize=10,
    )
