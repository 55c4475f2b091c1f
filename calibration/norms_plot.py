"""The norm report as a picture: how many tokens have which norm."""

from __future__ import annotations

import io
import textwrap

from sinkprune.calibration.norms import OUTLIER, NormReport
from sinkprune.runtime.plot import import_matplotlib


def plot_norms(report: NormReport, suffix: str) -> bytes:
    """A histogram of the norms with a logarithmic count, so that one token in a thousand can be seen.

    The bytes of a picture file of this suffix, e.g. ".png". Raises `UsageError` where matplotlib is missing.
    """
    figure = import_matplotlib()(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.stairs(report.histogram, report.edges, fill=True, color="#0072B2")
    axes.set_yscale("log")
    axes.axvline(OUTLIER, color="#D55E00", linestyle="--", label=f"outlier: {OUTLIER:g} medians")
    axes.set_xlabel("norm of a visual token, in its picture's median norms")
    axes.set_ylabel(f"tokens, of {report.tokens}")
    axes.set_title("\n".join(textwrap.wrap(f"{report.model}: {report.verdict}", 95)), fontsize=9, loc="left")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix.lstrip("."), dpi=140)
    return buffer.getvalue()
