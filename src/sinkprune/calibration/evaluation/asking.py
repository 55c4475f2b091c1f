"""Asks a bundle a task's questions with every method and budget, and counts what is right."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version

from PIL import Image

from sinkprune.calibration.evaluation.report import (
    BASELINE,
    Combination,
    CombinationReport,
    EvaluationReport,
    Reply,
    summarise,
)
from sinkprune.calibration.evaluation.sample_size import accuracy_warnings
from sinkprune.calibration.evaluation.unseen import unseen_warnings
from sinkprune.calibration.tasks import Item
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.errors import BudgetError, SinkpruneError, UsageError
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.text.questions import Question
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.profiling.profile import model_name
from sinkprune.runtime.system.processor import processor_name


def choose_combinations(
    manifest: Manifest, methods: Sequence[str], budgets: Sequence[str]
) -> tuple[list[Combination], list[Combination]]:
    """The combinations of `methods` and `budgets` that the bundle holds, and those it does not.

    None given means all of the bundle; `none` among the budgets is the baseline, which is no combination. Raises
    `BudgetError` for a method or budget that the bundle does not hold at all, and if no combination is left.
    """
    held = list(dict.fromkeys(budget for plans in manifest.plans.values() for budget in plans))
    for budget in budgets:
        if budget not in (UNPRUNED, *held):
            raise BudgetError(
                f"this bundle holds no budget '{budget}'; it holds: {', '.join([UNPRUNED, *held])}. "
                "Others must be exported first, with sinkprune-export --budgets."
            )
    for method in methods:
        manifest.plan(method, UNPRUNED)
    asked = [
        Combination(method, budget)
        for method in dict.fromkeys(methods or manifest.plans)
        for budget in dict.fromkeys(budgets or held)
        if budget != UNPRUNED
    ]
    reachable = [pair for pair in asked if pair.budget in manifest.plans[pair.method]]
    if asked and not reachable:
        raise BudgetError(
            f"this bundle holds none of the chosen methods at the chosen budgets; '{asked[0].method}' has: "
            f"{', '.join([UNPRUNED, *manifest.plans[asked[0].method]])}."
        )
    return reachable, [pair for pair in asked if pair not in reachable]


def ask(
    pipeline: Pipeline,
    items: Iterable[Item],
    combinations: Sequence[Combination],
    *,
    max_new_tokens: int = 8,
    on_run: Callable[[Combination], None] = lambda combination: None,
) -> list[Reply]:
    """Every combination's greedy reply to every question, those of one question one after the other.

    `BASELINE` is asked too. Each combination is run once on the first question before anything counts. `on_run` is
    told of each run that counts before it starts. Raises what `Pipeline.stream` raises, naming the question, and
    `UsageError` for fewer than one new token.
    """
    if max_new_tokens < 1:
        raise UsageError(f"max new tokens is {max_new_tokens}, expected at least 1.")
    turns = [BASELINE, *combinations]
    replies: list[Reply] = []
    for number, item in enumerate(items):
        image = item.load_image()
        if number == 0:
            for combination in turns:
                _reply(pipeline, image, item.question, combination, max_new_tokens)
        # Each question starts with another combination: being first after a pause is no combination's privilege.
        shift = number % len(turns)
        for combination in [*turns[shift:], *turns[:shift]]:
            on_run(combination)
            replies.append(_reply(pipeline, image, item.question, combination, max_new_tokens))
    return replies


def report(
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
    """Sum up the replies that `ask` gave, on `pipeline`, in the report that `sinkprune-evaluate --json` writes.

    `unreachable` are the combinations that `choose_combinations` found missing; the rest says how the task was asked.
    """
    by_combination: dict[Combination, list[Reply]] = {}
    for reply in replies:
        by_combination.setdefault(reply.combination, []).append(reply)
    base = by_combination.pop(BASELINE)
    methods: dict[str, dict[str, CombinationReport]] = {}
    for combination, own in by_combination.items():
        methods.setdefault(combination.method, {})[combination.budget] = summarise(own, base)
    manifest = pipeline.bundle.manifest
    return EvaluationReport(
        model=model_name(manifest.checkpoint.source),
        backend=pipeline.backend.name,
        precision=manifest.precision,
        weights=manifest.weights,
        compute=pipeline.backend.compute,
        machine=processor_name(),
        threads=pipeline.backend.threads,
        task=task,
        questions=len(base),
        blind=blind,
        planted_outliers=planted_outliers,
        fit=fit,
        max_new_tokens=max_new_tokens,
        versions={
            "sinkprune": version("sinkprune"),
            "python": platform.python_version(),
            **pipeline.backend.versions,
        },
        none=summarise(base, base),
        methods=methods,
        unreachable=tuple(unreachable),
        warnings=(
            *accuracy_warnings(len(base)),
            *([] if blind else unseen_warnings([reply.seen_share for reply in base])),
        ),
    )


def _reply(
    pipeline: Pipeline, image: Image.Image, question: Question, combination: Combination, max_new_tokens: int
) -> Reply:
    # The unpruned engines are the same whatever the method.
    method = next(iter(pipeline.bundle.manifest.plans)) if combination == BASELINE else combination.method
    try:
        answer = pipeline.generate(
            image, question.prompt, method=method, budget=combination.budget, max_new_tokens=max_new_tokens
        )
    except SinkpruneError as error:
        raise type(error)(f"question '{question.id}': {error}") from error
    ttft = answer.ms["ttft"]
    if ttft is None:
        raise ValueError("ttft is measured in every run")
    return Reply(
        id=question.id,
        kind=question.kind,
        combination=combination,
        text=answer.text,
        right=question.is_right(answer.text),
        mean_visual_tokens=sum(answer.tokens_per_layer) / len(answer.tokens_per_layer),
        ttft_ms=ttft,
        seen_share=answer.kept.layout.seen_share,
    )
