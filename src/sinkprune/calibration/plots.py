"""Plots of evaluations, norms, attention and quantisation, and heat maps of pictures.

Functions named `plot_` return the bytes of a picture file with the given suffix, e.g. ".png". All raise `UsageError`
if matplotlib is missing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
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
    from sinkprune.calibration.quantise import QuantisationReport

_SIDE = 3.6
"""Inches of a panel's longer side."""
_NARROWEST = 2.4
_OPAQUE = 0.75
_SINK_COLOUR = "#D55E00"
_TICKS = 5
_DECADES = 1e3
"""The range of the attention's scale: few tokens receive most of the attention."""


def write_heatmaps(folder: Path, maps: Iterable[tuple[Path, str, TokenFeatures]]) -> None:
    """Write heat maps, each to its file in `folder` with its title, and print a line about the folder.

    If none can be written, no new folder stays. Raises what `write_whole` and `draw_heatmaps` raise.
    """
    made = not folder.exists()
    make_folder(folder)
    try:
        for file, title, features in maps:
            write_whole(file, draw_heatmaps(features, title))
    finally:
        if made:
            with suppress(OSError):
                folder.rmdir()
    note_written(folder)


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
_FEW_METHODS = 4
"""So many intervals at one budget are readable."""
_NAME_GAP = 0.026
"""The least distance of two names, in heights of the axes."""


def _new_figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    figure = import_matplotlib()(figsize=(width, height), layout="constrained")
    panels = figure.subplots(1, columns, squeeze=False)[0]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def plot_evaluation(report: EvaluationReport, suffix: str) -> bytes:
    """Draw accuracy against visual tokens: a line for each method, and a band for the unpruned model.

    Names stand at the points with the fewest tokens. Of more than `_FEW_METHODS`, only SinkPruner has its intervals.
    Budgets with an option are hollow points, because they have as many tokens as those without.
    """
    figure, (axes,) = _new_figure(11, 7)
    unpruned, looks = report.none, _looks(list(report.methods))
    low, high = unpruned.ci95
    band = axes.axhspan(100 * low, 100 * high, color="#000000", alpha=0.1, linewidth=0)
    axes.axhline(100 * unpruned.accuracy, color="#000000", linewidth=1)
    ends: dict[str, tuple[float, float]] = {}
    for method, budgets in report.methods.items():
        plain = [point for name, point in budgets.items() if "+" not in name] or [*budgets.values()]
        points = [unpruned, *sorted(plain, key=lambda point: -point.mean_visual_tokens)]
        tokens, accuracies = zip(*((each.mean_visual_tokens, 100 * each.accuracy) for each in points), strict=True)
        axes.plot(tokens, accuracies, **looks[method])
        hollow = looks[method] | {"linestyle": "none", "markerfacecolor": "none"}
        for point in (point for point in budgets.values() if point not in plain):
            axes.plot(point.mean_visual_tokens, 100 * point.accuracy, **hollow)
        if method == OWN or len(looks) <= _FEW_METHODS:
            reach = [[100 * abs(point.ci95[end] - point.accuracy) for point in points[1:]] for end in (0, 1)]
            style = {name: looks[method].get(name) for name in ("color", "zorder")}
            axes.errorbar(tokens[1:], accuracies[1:], yerr=reach, fmt="none", capsize=3, **style)
        ends[method] = tokens[-1], accuracies[-1]
    _label(axes, report)
    _name_ends(axes, ends, looks)
    text = f"none (unpruned): {100 * unpruned.accuracy:.1f} %, with its 95 % interval"
    axes.legend([band], [text], loc="lower left", frameon=False, fontsize=9)
    return figure_bytes(figure, suffix)


def _name_ends(axes: Any, ends: dict[str, tuple[float, float]], looks: dict[str, dict[str, Any]]) -> None:
    """Write the name of each method next to its last point, in a column, or at the point if others go further."""
    fewest = min((tokens for tokens, _ in ends.values()), default=0.0)
    low, high = axes.get_ylim()
    top = float("inf")
    for method, (tokens, accuracy) in sorted(ends.items(), key=lambda end: -end[1][1]):
        style = {"color": looks[method]["color"], "fontsize": 8, "weight": "bold" if method == OWN else "normal"}
        if tokens > 1.1 * fewest:
            box = {"facecolor": "#ffffff", "linewidth": 0, "alpha": 0.8, "pad": 0.5}
            place = {"xytext": (7, 0), "textcoords": "offset points", "va": "center", "bbox": box, "zorder": 20}
            axes.annotate(method, (tokens, accuracy), **place, **style)
            continue
        top = min((accuracy - low) / (high - low), top - _NAME_GAP)
        line = {
            "arrowstyle": "-",
            "color": style["color"],
            "linewidth": 0.5,
            "shrinkA": 1,
            "shrinkB": 2,
            "relpos": (0, 0.5),
        }
        place = {"xytext": (1.03, top), "textcoords": "axes fraction", "va": "center", "annotation_clip": False}
        axes.annotate(f"{method} {accuracy:.1f}", (tokens, accuracy), arrowprops=line, **place, **style)


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
    points = [point for budgets in report.methods.values() for point in budgets.values()]
    names = {name for budgets in report.methods.values() for name in budgets}
    lowest = min((point.ci95[0] for point in [report.none, *points]), default=0.0)
    start = 10 * int(10 * lowest)
    axes.set_ylim(start, 101)
    axes.set_xscale("log")
    axes.invert_xaxis()
    ticks = [report.none.mean_visual_tokens]
    for count in sorted((point.mean_visual_tokens for point in points), reverse=True):
        # Closer labels would overlap on a logarithmic axis.
        if count < ticks[-1] / 1.12:
            ticks.append(count)
    axes.set_xlim(left=ticks[0])
    axes.set_xticks(ticks, labels=[f"{count:.0f}" for count in ticks])
    axes.minorticks_off()
    axes.set_xlabel("visual tokens, mean over layers and questions: unpruned at the left, fewest at the right")
    axes.set_ylabel(f"accuracy, % (the axis starts at {start} %)" if start else "accuracy, %")
    axes.grid(axis="y", alpha=0.25)
    blind = ", pictures greyed out" if report.blind else ""
    few = " (small sample)" if report.questions < FEW_QUESTIONS else ""
    optional = "; hollow: budgets with an option" if any("+" in name for name in names) else ""
    whose = "" if len(report.methods) <= _FEW_METHODS else f" of {OWN}"
    questions = f"{counted(report.questions, 'question')}{blind}{few}; bars{whose}: 95 % intervals{optional}"
    axes.set_title(
        f"{report.model}, {report.weights.beside(report.precision)}, {report.backend}: {report.task}, {questions}",
        fontsize=10,
    )
