"""The attention report, field by field, and the means it has of the questions' figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from sinkprune.calibration.evaluation.intervals import Mean, PictureBootstrap
from sinkprune.calibration.evaluation.report import TaskReport
from sinkprune.contract.precision import WeightForms

Figure = TypeVar("Figure")
"""`float` in the figures of one question, `Mean` in those over questions."""


@dataclass(frozen=True)
class LayerFigures(Generic[Figure]):
    """One prune layer, before it drops rows."""

    rows: float
    """V: visual rows that the layer ran on."""
    sink_share: Figure
    """The fraction of those rows that are sink tokens."""
    entropy: Figure
    """Nats: entropy of the text's attention over the V rows, mean over heads and text rows (`TextAttention`)."""
    entropy_of_mean: Figure
    """Nats: entropy of the attention's mean over heads and text rows."""
    uniform: float
    """Nats: ln V, which neither entropy can exceed: fewer rows alone lower it."""
    sink_attention: Figure
    """The fraction of the text's attention on visual rows that falls on sink tokens."""


@dataclass(frozen=True)
class RunFigures(Generic[Figure]):
    """One method at one budget, or the unpruned engines."""

    rows: float
    """Visual rows in front of the LLM."""
    sink_share: Figure
    """The fraction of them that are sink tokens; the average of the sink tokens counts as one."""
    salience_alone: Figure
    """What `sink_share` would be if as many tokens of each group were chosen by their salience alone."""
    last_rows: float
    """Visual rows that the last decoder layer ran on."""
    last_sink_share: Figure
    """The fraction of those that are sink tokens."""
    layers: dict[str, LayerFigures[Figure]]
    """By prune layer (0-based): each after which the bundle's decoder is cut."""


Observation = RunFigures[float]
"""The figures of one question."""
RunMeans = RunFigures[Mean]
"""The means over questions."""
LayerMeans = LayerFigures[Mean]
"""The means over questions at one prune layer."""
_WITHOUT_INTERVAL = ("rows", "last_rows", "uniform")


@dataclass(frozen=True, kw_only=True)
class AttentionReport(TaskReport):
    """What `sinkprune-calibrate attention --json` writes."""

    precision: str
    weights: WeightForms
    outlier_per_mille: int
    """rho: sink tokens are so many per mille of each group's tokens, rounded up, those of largest norm."""
    none: RunMeans
    """The unpruned engines: all visual tokens, nothing sanitised."""
    methods: dict[str, dict[str, RunMeans]]
    """By method, then budget."""


def summarise(pictures: Sequence[str], observations: Sequence[Observation]) -> RunMeans:
    """Return the means over questions. `pictures` names the picture of each, for its share of the bootstrap."""
    averaged = PictureBootstrap(pictures)

    def means(figures: Sequence[Any]) -> dict[str, Any]:
        names = [field.name for field in fields(figures[0]) if field.name != "layers"]
        found = {name: averaged([getattr(one, name) for one in figures]) for name in names}
        return {name: value.mean if name in _WITHOUT_INTERVAL else value for name, value in found.items()}

    layers = {
        layer: LayerMeans(**means([seen.layers[layer] for seen in observations])) for layer in observations[0].layers
    }
    return RunMeans(layers=layers, **means(observations))
