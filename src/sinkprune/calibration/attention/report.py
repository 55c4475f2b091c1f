"""The attention report, field by field, and how it is summed up from what was observed of each question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sinkprune.calibration.evaluation.intervals import Mean, PictureBootstrap


@dataclass(frozen=True)
class LayerObservation:
    """What one prune layer ran on for one question, before anything is dropped behind it."""

    rows: int
    """V: its visual rows."""
    sink_share: float
    """The fraction of the V rows that are sink tokens."""
    entropy: float
    entropy_of_mean: float
    uniform: float
    sink_attention: float
    """The fraction of the text's attention on visual rows that falls on sink tokens."""


@dataclass(frozen=True)
class Observation:
    """What one run kept of one question's picture, and how its text attended."""

    picture: str
    """Names the picture: questions that share it are resampled together."""
    rows: int
    """Visual rows in front of the LLM."""
    sink_share: float
    salience_alone: float
    last_rows: int
    """Visual rows that the last decoder layer ran on."""
    last_sink_share: float
    layers: dict[int, LayerObservation]
    """By prune layer (0-based)."""


@dataclass(frozen=True)
class LayerReport:
    """One prune layer: means over the questions."""

    rows: float
    """V: visual rows that the layer ran on."""
    sink_share: Mean
    """The fraction of those rows that are sink tokens."""
    entropy: Mean
    """Nats: entropy of the text's attention over the V rows, mean over heads and text rows (`TextAttention`)."""
    entropy_of_mean: Mean
    """Nats: entropy of the attention's mean over heads and text rows."""
    uniform: float
    """Nats: ln V, which neither entropy can exceed: fewer rows alone lower it."""
    sink_attention: Mean
    """The fraction of the text's attention on visual rows that falls on sink tokens."""


@dataclass(frozen=True)
class RunReport:
    """One method at one budget, or the unpruned engines: means over the questions."""

    rows: float
    """Visual rows in front of the LLM."""
    sink_share: Mean
    """The fraction of them that are sink tokens; the average of the sink tokens counts as one."""
    salience_alone: Mean
    """What `sink_share` would be if as many tokens of each group were chosen by their salience alone."""
    last_rows: float
    """Visual rows that the last decoder layer ran on."""
    last_sink_share: Mean
    """The fraction of those that are sink tokens."""
    layers: dict[str, LayerReport]
    """By prune layer (0-based): each after which the bundle's decoder is cut."""


@dataclass(frozen=True)
class AttentionReport:
    """What `sinkprune-calibrate attention --json` writes."""

    model: str
    """The checkpoint's name."""
    backend: str
    precision: str
    compute: str
    """What engines compute in, in words."""
    task: str
    """The task's name, or its file's."""
    questions: int
    pictures: int
    outlier_per_mille: int
    """rho: sink tokens are so many per mille of each group's tokens, rounded up, those of largest norm."""
    none: RunReport
    """The unpruned engines: all visual tokens, nothing sanitised."""
    methods: dict[str, dict[str, RunReport]]
    """By method, then budget."""
    warnings: tuple[str, ...]
    """Sentences: why the figures say little, for example too few pictures."""


def summarise(observations: Sequence[Observation]) -> RunReport:
    """The report of one run from what was observed of each question."""
    averaged = PictureBootstrap([seen.picture for seen in observations])

    def mean(value: Callable[[Observation], float]) -> Mean:
        return averaged([value(seen) for seen in observations])

    def layer_report(layer: int) -> LayerReport:
        def of_layer(value: Callable[[LayerObservation], float]) -> Mean:
            return mean(lambda seen: value(seen.layers[layer]))

        return LayerReport(
            rows=of_layer(lambda seen: seen.rows).mean,
            sink_share=of_layer(lambda seen: seen.sink_share),
            entropy=of_layer(lambda seen: seen.entropy),
            entropy_of_mean=of_layer(lambda seen: seen.entropy_of_mean),
            uniform=of_layer(lambda seen: seen.uniform).mean,
            sink_attention=of_layer(lambda seen: seen.sink_attention),
        )

    return RunReport(
        rows=mean(lambda seen: seen.rows).mean,
        sink_share=mean(lambda seen: seen.sink_share),
        salience_alone=mean(lambda seen: seen.salience_alone),
        last_rows=mean(lambda seen: seen.last_rows).mean,
        last_sink_share=mean(lambda seen: seen.last_sink_share),
        layers={str(layer): layer_report(layer) for layer in observations[0].layers},
    )
