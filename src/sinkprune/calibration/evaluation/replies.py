"""A bundle's replies to a task's questions with every method and budget, and what an evaluation reports.

Outliers can be planted in a tower without any: the paper finds in large towers that about 1 % of the tokens, in
background, have large norms, draw the attention of the CLS token, and hold no information about their place
(method.md section 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sinkprune.calibration.evaluation.statistics import (
    Interval,
    Mean,
    PictureBootstrap,
    accuracy_warnings,
    mean_warnings,
    relative_accuracy,
    wilson,
)
from sinkprune.calibration.tasks import Item, naming, with_grey_picture
from sinkprune.contract.budgets import UNPRUNED, is_tower
from sinkprune.contract.checks import unknown_name
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import WeightForms
from sinkprune.contract.questions import Question
from sinkprune.contract.report import Spread
from sinkprune.runtime.backends import Backend, Engine, Tensor
from sinkprune.runtime.media.picture_warnings import unseen_warnings
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.profiling.profile import check_budgets, model_name, used_versions
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.request import MAX_NEW_TOKENS

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

    return with_outliers if is_tower(graph) else engine


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
    precision: str
    weights: WeightForms
    warnings: tuple[str, ...]
    """Sentences: why the figures say little, for example too few questions."""
    seen_share: float = 1.0
    """The share of its area that the model sees of the picture that it sees least of."""


def task_head(manifest: Manifest, backend: Backend, task: str, pictures: Sequence[object]) -> dict[str, Any]:
    """Return the fields of a `TaskReport`, without warnings and share, of a question about each of `pictures`."""
    return {
        "model": model_name(manifest.checkpoint.source),
        "backend": backend.name,
        "compute": backend.compute,
        "task": task,
        "questions": len(pictures),
        "pictures": len(set(pictures)),
        "precision": manifest.precision,
        "weights": manifest.weights,
    }


@dataclass(frozen=True, kw_only=True)
class EvaluationReport(TaskReport):
    """What `sinkprune-evaluate --json` writes: every combination against the unpruned engines, on one task."""

    machine: str
    """The processor, in words."""
    threads: int
    """CPU threads of the backend."""
    versions: dict[str, str]
    """Of sinkprune, Python and the engine library, by name."""
    blind: bool
    """Whether every picture was replaced by a grey one."""
    planted_outliers: bool
    """Whether background tokens were turned into outliers (`sinkprune.calibration.evaluation.replies`)."""
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
    replies: Sequence[Reply], base: Sequence[Reply], bootstrap: PictureBootstrap, first: Sequence[Reply] | None = None
) -> CombinationReport:
    """Return the report of one combination from its replies and the baseline's, to the same questions in order.

    `bootstrap` is of the pictures of these questions. `first` are the replies of the first method at the same budget,
    for another method.
    """
    right = np.array([reply.right for reply in replies])
    base_right = np.array([reply.right for reply in base])
    more = [own.right - other.right for own, other in zip(replies, first, strict=True)] if first else None
    kinds: dict[str, list[bool]] = {}
    for reply in replies:
        kinds.setdefault(reply.kind, []).append(reply.right)
    return CombinationReport(
        accuracy=float(right.mean()),
        ci95=wilson(int(right.sum()), len(right)),
        relative=relative_accuracy(right, base_right),
        relative_ci95=bootstrap.relative(right, base_right),
        versus_first=bootstrap(more) if more else None,
        by_kind={
            kind: KindReport(sum(own) / len(own), wilson(sum(own), len(own)), len(own)) for kind, own in kinds.items()
        },
        mean_visual_tokens=sum(reply.mean_visual_tokens for reply in replies) / len(replies),
        ttft_ms=Spread.of([reply.ttft_ms for reply in replies]),
        prefill_ms=Spread.of([reply.prefill_ms for reply in replies]),
        latency_ms=Spread.of([reply.latency_ms for reply in replies]),
    )


NEW_TOKENS = 8
"""The most new tokens of a reply."""


def choose_combinations(
    manifest: Manifest, methods: Sequence[str], budgets: Sequence[str]
) -> tuple[list[Combination], list[Combination]]:
    """Return the combinations of `methods` and `budgets` that the bundle holds, and those it does not.

    Empty `methods` or `budgets` mean all of the bundle. `none` among the budgets is the baseline and no combination.
    Raises `BudgetError` for a method or budget that the bundle does not hold at all, and if no combination is left.
    """
    held = list(dict.fromkeys(budget for plans in manifest.plans.values() for budget in plans))
    for budget in budgets:
        if budget not in (UNPRUNED, *held):
            raise BudgetError(
                unknown_name(f"this bundle holds no budget '{budget}'", budget, [UNPRUNED, *held], "It holds")
                + " Others must be exported first, with sinkprune-export --budgets."
            )
    for method in methods:
        manifest.plan(method, UNPRUNED)
    chosen = [
        Combination(method, budget)
        for method in dict.fromkeys(methods or manifest.plans)
        for budget in dict.fromkeys(budgets or held)
        if budget != UNPRUNED
    ]
    reachable = [pair for pair in chosen if pair.budget in manifest.plans[pair.method]]
    if chosen and not reachable:
        method = chosen[0].method
        raise BudgetError(
            f"this bundle holds none of the chosen methods at the chosen budgets; '{method}' has: "
            f"{', '.join([UNPRUNED, *manifest.plans[method]])}."
        )
    return reachable, [pair for pair in chosen if pair not in reachable]


def check_questions(
    pipeline: Pipeline, items: Iterable[Item], combinations: Sequence[Combination], max_new_tokens: int = NEW_TOKENS
) -> None:
    """Check that every question can be asked with all `combinations`, the longest first, before any is.

    Raises `PromptError` for a question that is too long, and `PruningError` for a picture of which a budget would
    drop nothing, with the question's place.
    """
    sizes = set[tuple[int, int]]()
    with status("checking the questions"):
        for item in items:
            # What a budget drops depends on the picture's size alone.
            pairs = combinations[:1] if item.facts.size in sizes else combinations
            sizes.add(item.facts.size)
            # Pixels change neither.
            image = with_grey_picture(item).load_image()
            with naming(item.place):
                for pair in pairs:
                    plan, method = [pair.budget], pair.method_of(pipeline.bundle.manifest)
                    check_budgets(pipeline, image, item.prompt, plan, method=method, new_tokens=max_new_tokens)


def collect_replies(
    pipeline: Pipeline, items: Iterable[Item], combinations: Sequence[Combination], **options: Any
) -> list[Reply]:
    """Return the replies of `replies_by_question`, with the same `options`, in one list."""
    return [reply for own in replies_by_question(pipeline, items, combinations, **options) for reply in own]


def replies_by_question(
    pipeline: Pipeline,
    items: Iterable[Item],
    combinations: Sequence[Combination],
    *,
    max_new_tokens: int = NEW_TOKENS,
    on_warm_up: Callable[[Combination], None] = lambda combination: None,
    on_run: Callable[[Combination], None] = lambda combination: None,
) -> Iterator[list[Reply]]:
    """Yield, for each question, the greedy replies of `BASELINE` and every combination.

    Each combination runs once on the first question as a warm-up. `on_warm_up` is called before each of
    those runs, and `on_run` before each run that counts.
    Raises what `Pipeline.generate` raises, with the question's id, and `UsageError` for fewer than one new token.
    """
    MAX_NEW_TOKENS.check(max_new_tokens)
    turns = [BASELINE, *combinations]
    for number, item in enumerate(items):
        image = item.load_image()
        if number == 0:
            for combination in turns:
                on_warm_up(combination)
                _reply(pipeline, item, image, combination, max_new_tokens)
        # Rotate the order, so that the pause between questions favours no combination.
        shift = number % len(turns)
        replies = []
        for combination in [*turns[shift:], *turns[:shift]]:
            on_run(combination)
            replies.append(_reply(pipeline, item, image, combination, max_new_tokens))
        yield replies


def evaluation_report(
    pipeline: Pipeline,
    replies: Sequence[Reply],
    unreachable: Sequence[Combination],
    *,
    task: str,
    blind: bool,
    planted_outliers: bool,
    max_new_tokens: int,
    fit: str | None = None,
) -> EvaluationReport:
    """Return the report that `sinkprune-evaluate --json` writes, from the replies of `collect_replies`.

    `unreachable` are the combinations that `choose_combinations` found missing. The other arguments describe the run.
    """
    by_combination: dict[Combination, list[Reply]] = {}
    for reply in replies:
        by_combination.setdefault(reply.combination, []).append(reply)
    base = by_combination.pop(BASELINE)
    pictures = [reply.picture for reply in base]
    bootstrap = PictureBootstrap(pictures)
    methods: dict[str, dict[str, CombinationReport]] = {}
    for combination, own in by_combination.items():
        found = methods.setdefault(combination.method, {})
        first = Combination(next(iter(methods)), combination.budget)
        other = by_combination.get(first) if first != combination else None
        found[combination.budget] = summarise(own, base, bootstrap, other)
    manifest = pipeline.bundle.manifest
    return EvaluationReport(
        **task_head(manifest, pipeline.backend, task, pictures),
        machine=pipeline.backend.machine,
        threads=pipeline.backend.threads,
        versions=used_versions(pipeline.backend),
        blind=blind,
        planted_outliers=planted_outliers,
        fit=fit,
        max_new_tokens=max_new_tokens,
        none=summarise(base, base, bootstrap),
        methods=methods,
        unreachable=tuple(unreachable),
        warnings=(
            *accuracy_warnings(len(base)),
            *mean_warnings(len(set(pictures))),
            *([] if blind else unseen_warnings([reply.seen_share for reply in base], "questions")),
        ),
        seen_share=min(reply.seen_share for reply in base),
    )


def generate_answer(
    pipeline: Pipeline, image: Image.Image, question: Question, combination: Combination, **options: Any
) -> Answer:
    """Generate the answer to a question with one method and budget; `options` are those of `Pipeline.generate`.

    Raises what `Pipeline.generate` raises, with the question's id.
    """
    method = combination.method_of(pipeline.bundle.manifest)
    with naming(f"question '{question.id}'"):
        return pipeline.generate(image, question.prompt, method=method, budget=combination.budget, **options)


def _reply(
    pipeline: Pipeline, item: Item, image: Image.Image, combination: Combination, max_new_tokens: int
) -> Reply:
    question = item.question
    answer = generate_answer(pipeline, image, question, combination, max_new_tokens=max_new_tokens)
    return Reply(
        id=question.id,
        kind=question.kind,
        combination=combination,
        text=answer.text,
        right=question.is_right(answer.text),
        mean_visual_tokens=sum(answer.tokens_per_layer) / len(answer.tokens_per_layer),
        ttft_ms=answer.ms["ttft"] or 0.0,
        prefill_ms=answer.ms["prefill"] or 0.0,
        latency_ms=answer.ms["latency"] or 0.0,
        picture=item.picture,
        seen_share=answer.kept.layout.seen_share,
    )
