"""A bundle's replies to a task's questions with every method and budget, and their report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from PIL import Image

from sinkprune.calibration.evaluation.report import (
    BASELINE,
    Combination,
    CombinationReport,
    EvaluationReport,
    Reply,
    summarise,
    timed_head,
)
from sinkprune.calibration.evaluation.statistics import PictureBootstrap, accuracy_warnings, mean_warnings
from sinkprune.calibration.tasks import Item, naming, with_grey_picture
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.questions import Question
from sinkprune.runtime.media.picture_warnings import unseen_warnings
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.profiling.profile import check_budgets
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.request import MAX_NEW_TOKENS

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
                f"this bundle holds no budget '{budget}'; it holds: {', '.join([UNPRUNED, *held])}. "
                "Others must be exported first, with sinkprune-export --budgets."
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
    pipeline: Pipeline,
    items: Iterable[Item],
    combinations: Sequence[Combination],
    max_new_tokens: int = NEW_TOKENS,
) -> None:
    """Check that every question can be asked with all `combinations`, the longest first, before any is.

    Raises what `check_question` raises.
    """
    sizes = set[tuple[int, int]]()
    with status("checking the questions"):
        for item in items:
            # What a budget drops depends on the picture's size alone.
            pairs = combinations[:1] if item.facts.size in sizes else combinations
            check_question(pipeline, item, pairs, max_new_tokens)
            sizes.add(item.facts.size)


def check_question(pipeline: Pipeline, item: Item, combinations: Iterable[Combination], max_new_tokens: int) -> None:
    """Check that a question can be asked with all `combinations`, without running the model.

    Raises `PromptError` for a question that is too long, and `PruningError` for a picture of which a budget would
    drop nothing, with the question's place.
    """
    # Pixels change neither.
    image = with_grey_picture(item).load_image()
    with naming(item.place):
        for pair in combinations:
            method = pair.method_of(pipeline.bundle.manifest)
            check_budgets(pipeline, image, item.prompt, [pair.budget], method=method, new_tokens=max_new_tokens)


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
        **timed_head(manifest, pipeline.backend, task, pictures),
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
    ms = {part: answer.ms[part] or 0.0 for part in ("ttft", "prefill", "latency")}
    return Reply(
        id=question.id,
        kind=question.kind,
        combination=combination,
        text=answer.text,
        right=question.is_right(answer.text),
        mean_visual_tokens=sum(answer.tokens_per_layer) / len(answer.tokens_per_layer),
        ttft_ms=ms["ttft"],
        prefill_ms=ms["prefill"],
        latency_ms=ms["latency"],
        picture=item.picture,
        seen_share=answer.kept.layout.seen_share,
    )
