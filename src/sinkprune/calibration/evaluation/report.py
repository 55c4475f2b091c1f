"""What an evaluation reports.

The paper finds in large towers that about 1 % of the tokens, in background, have large norms. They draw the attention
of the CLS token and hold no information about their place (method.md section 1). This module adds such tokens to a
tower without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sinkprune.calibration.evaluation.statistics import Interval, Mean, PictureBootstrap, relative_accuracy, wilson
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import WeightForms
from sinkprune.contract.report import Spread
from sinkprune.runtime.backends import Backend, Engine, Tensor
from sinkprune.runtime.profiling.profile import model_name, used_versions

_PER_MILLE = 10
_NORM = 4.0
"""The norm of a planted token, in medians of its group."""


def plant_in_vision(graph: str, engine: Engine, backend: Backend) -> Engine:
    """Wrap the engine of the graph `vision` to plant outliers in its output; return any other engine unchanged.

    For `wrap` of `Pipeline.load`.
    """
    names = ("tokens", "norms", "salience")

    def with_outliers(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        features = engine(inputs)
        arrays = plant_outliers(*(backend.numpy(features[name]) for name in names))
        planted = {name: backend.tensor(array) for name, array in zip(names, arrays, strict=True)}
        return {**features, **planted}

    return with_outliers if graph == "vision" else engine


def plant_outliers(tokens: NDArray[Any], norms: NDArray[Any], salience: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Turn the least salient 1 % of each group's tokens (at least one) into outliers; returns copies.

    `tokens` [G,N,D] float, `norms` [G,N] and `salience` [G,N] fp32. A planted token points where the group's mean
    does, at 4 times the group's median norm, and is as salient as the group's most salient token.
    """
    tokens, norms, salience = tokens.copy(), norms.copy(), salience.copy()
    count = -(-norms.shape[1] * _PER_MILLE // 1000)
    for group in range(len(norms)):
        background = np.argsort(salience[group], kind="stable")[:count]
        mean = tokens[group].astype(np.float32).mean(axis=0)
        norm = _NORM * float(np.median(norms[group]))
        tokens[group, background] = mean * (norm / max(float(np.linalg.norm(mean)), 1e-6))
        norms[group, background] = norm
        salience[group, background] = salience[group].max()
    return tokens, norms, salience


class Combination(NamedTuple):
    """A method at a budget, by their names in the bundle."""

    method: str
    budget: str

    def method_of(self, manifest: Manifest) -> str:
        """Return a method of the bundle for a request: the unpruned engines are the same for every method."""
        return next(iter(manifest.plans)) if self.budget == UNPRUNED else self.method


BASELINE = Combination(UNPRUNED, UNPRUNED)
"""The unpruned engines, with which every evaluation compares the others."""


@dataclass(frozen=True)
class Reply:
    """One combination's reply to one question, and its cost."""

    id: str
    """The question's id within its task."""
    kind: str
    """The question's kind, e.g. "existence"."""
    combination: Combination
    text: str
    right: bool
    """Whether `text` answers the question."""
    mean_visual_tokens: float
    """Visual tokens a decoder layer ran on, mean over all layers (input counting)."""
    ttft_ms: float
    """Milliseconds from the request to the first token."""
    prefill_ms: float
    """Milliseconds of the prefill, with its selects."""
    latency_ms: float
    """Milliseconds from the request to the last token."""
    picture: str
    """The picture's name. Questions about one picture are not independent."""
    seen_share: float
    """The share of the picture's area that the model sees."""


@dataclass(frozen=True)
class KindReport:
    """One combination's answers to the questions of one kind."""

    accuracy: float
    """The fraction that was answered rightly."""
    ci95: Interval
    """Wilson's 95 % interval of `accuracy`."""
    count: int
    """Questions of this kind."""


@dataclass(frozen=True)
class CombinationReport:
    """One combination's answers to all questions. Accuracies are fractions."""

    accuracy: float
    """The fraction that was answered rightly."""
    ci95: Interval
    """Wilson's 95 % interval of `accuracy`."""
    relative: float | None
    """Accuracy over that of the unpruned engines; None if those had no right answer."""
    relative_ci95: Interval | None
    """The 95 % interval of `relative`, by paired bootstrap over the pictures; None for one picture, and if `relative`
    is."""
    versus_first: Mean | None
    """The accuracy minus that of the first method at the same budget, with its 95 % interval by paired bootstrap over
    the pictures; None for the first method, and where that one lacks the budget."""
    by_kind: dict[str, KindReport]
    """The answers to the questions of each kind, by the kind's name."""
    mean_visual_tokens: float
    """Visual tokens a decoder layer ran on, mean over all layers and questions (input counting)."""
    ttft_ms: Spread
    """Milliseconds from a request to its first token, over the questions."""
    prefill_ms: Spread
    """Milliseconds of the prefill, with its selects."""
    latency_ms: Spread
    """Milliseconds from a request to its last token."""


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """The head of every report about the questions of a task."""

    model: str
    """The checkpoint's name."""
    backend: str
    compute: str
    """What engines compute in, in words."""
    task: str
    """The task's name, or its file's."""
    questions: int
    pictures: int
    warnings: tuple[str, ...]
    """Sentences: why the figures say little, for example too few questions."""
    seen_share: float = 1.0
    """The share of its area that the model sees of the picture that it sees least of."""


@dataclass(frozen=True, kw_only=True)
class TimedTaskReport(TaskReport):
    """The head of every such report with times."""

    precision: str
    weights: WeightForms
    machine: str
    """The processor, in words."""
    threads: int
    """CPU threads of the backend."""
    versions: dict[str, str]
    """Of sinkprune, Python and the engine library, by name."""


def task_head(manifest: Manifest, backend: Backend, task: str, pictures: Sequence[object]) -> dict[str, Any]:
    """Return the fields of a `TaskReport`, without warnings and share, of a question about each of `pictures`."""
    return {
        "model": model_name(manifest.checkpoint.source),
        "backend": backend.name,
        "compute": backend.compute,
        "task": task,
        "questions": len(pictures),
        "pictures": len(set(pictures)),
    }


def timed_head(manifest: Manifest, backend: Backend, task: str, pictures: Sequence[object]) -> dict[str, Any]:
    """Return the same fields of a `TimedTaskReport`."""
    return {
        **task_head(manifest, backend, task, pictures),
        "precision": manifest.precision,
        "weights": manifest.weights,
        "machine": backend.machine,
        "threads": backend.threads,
        "versions": used_versions(backend),
    }


@dataclass(frozen=True, kw_only=True)
class EvaluationReport(TimedTaskReport):
    """What `sinkprune-evaluate --json` writes: every combination against the unpruned engines, on one task."""

    blind: bool
    """Whether every picture was replaced by a grey one."""
    planted_outliers: bool
    """Whether background tokens were turned into outliers (`sinkprune.calibration.evaluation.report`)."""
    fit: str | None
    """The fit of pictures to the model's square (`sinkprune.runtime.media.images`); None for the checkpoint's own."""
    max_new_tokens: int
    """The longest answer, in tokens."""
    none: CombinationReport
    """The unpruned engines, which all others are compared with."""
    methods: dict[str, dict[str, CombinationReport]]
    """Each combination, by method, then budget."""
    unreachable: tuple[Combination, ...]
    """Requested combinations that the bundle does not hold: methods that cannot reach a budget's mean."""


def summarise(
    replies: Sequence[Reply],
    base: Sequence[Reply],
    bootstrap: PictureBootstrap,
    first: Sequence[Reply] | None = None,
) -> CombinationReport:
    """Return the report of one combination from its replies and the baseline's, to the same questions in order.

    `bootstrap` is of the pictures of these questions. `first` are the replies of the first method at the same budget,
    for another method.
    """
    right = np.array([reply.right for reply in replies])
    base_right = np.array([reply.right for reply in base])
    versus = None
    if first is not None:
        versus = bootstrap([own.right - other.right for own, other in zip(replies, first, strict=True)])
    kinds = dict.fromkeys(reply.kind for reply in replies)
    return CombinationReport(
        accuracy=float(right.mean()),
        ci95=wilson(int(right.sum()), len(right)),
        relative=relative_accuracy(right, base_right),
        relative_ci95=bootstrap.relative(right, base_right),
        versus_first=versus,
        by_kind={kind: _summarise_kind([reply for reply in replies if reply.kind == kind]) for kind in kinds},
        mean_visual_tokens=sum(reply.mean_visual_tokens for reply in replies) / len(replies),
        ttft_ms=Spread.of([reply.ttft_ms for reply in replies]),
        prefill_ms=Spread.of([reply.prefill_ms for reply in replies]),
        latency_ms=Spread.of([reply.latency_ms for reply in replies]),
    )


def _summarise_kind(replies: Sequence[Reply]) -> KindReport:
    right = sum(reply.right for reply in replies)
    return KindReport(right / len(replies), wilson(right, len(replies)), len(replies))
