"""Pipelines whose requests may have a deadline: costs are measured and kept, and budgets chosen by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sinkprune.contract.budgets import Plan
from sinkprune.contract.progress import OnProgress, unreported
from sinkprune.deadlines.costs import Costs
from sinkprune.deadlines.measuring import (
    MEASURING_COSTS,
    SECONDS,
    SECONDS_RANGE,
    KeepsCosts,
    measure_costs,
    shown_progress,
    warn_of_load,
)
from sinkprune.deadlines.policy import DeadlinePolicy, check_chosen_after_tower
from sinkprune.runtime import pipeline
from sinkprune.runtime.hooks import Budgets, Tokens
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.pictures import PictureLike
from sinkprune.runtime.steps.request import Request, check_request_options
from sinkprune.runtime.stream import StreamState


class Pipeline(pipeline.Pipeline, KeepsCosts[Costs]):
    __doc__ = pipeline.Pipeline.__doc__

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        KeepsCosts.__init__(self, self.bundle, self.backend, Costs)

    def _budgets_of(self, request: Request, plan: Plan | None, tokens: Tokens) -> Callable[[StreamState], Budgets]:
        deadline_ms = request.deadline_ms
        if deadline_ms is None:
            return super()._budgets_of(request, plan, tokens)
        check_chosen_after_tower(self.bundle.manifest, request.method)
        costs = self._known_costs()

        def made(state: StreamState) -> Budgets:
            given = self.bundle.manifest, request, plan, tokens.passes, deadline_ms, costs, self._history_of(costs)
            return DeadlinePolicy(*given, began=state.began(), first_uses=lambda: self.chain.first_uses)

        return made

    def warm_up(
        self,
        image: PictureLike | Sequence[PictureLike],
        prompt: str | Sequence[str],
        *,
        seconds: float = SECONDS,
        progress: bool | OnProgress = False,
        **options: Any,
    ) -> Costs:
        """Measure the costs of requests like this one on this machine, and load all budgets.

        Requests with a deadline need these costs. Give your largest picture: for far more tokens than were measured,
        times are expected too long. Repeats measurements for `seconds`, from 0 to 86400, but every budget answers
        five times or more. So on an idle machine this takes 3 to 15 seconds for a small model, even with 0, and
        minutes for a large one. `progress=True` shows on stderr what is done and the time left. A function is called
        with the name of the work, the steps that are done, how many there probably are, and what a step is.

        Takes what `stream` takes. With `deadline_ms`, whole requests at budgets that are far too slow are left out.
        Sets and returns `costs`, and writes them to the user's cache folder for later processes.

        Warns with `CostsWarning` if other programs kept the machine busy meanwhile, or if that folder cannot be
        written. Raises what `generate` raises.
        """
        check_request_options(options, "seconds", "progress")
        request = self.new_request(image, prompt, **options)
        with shown_progress(MEASURING_COSTS, progress) as report:
            costs = self.measure_costs(request, seconds, report)
        warn_of_load(costs)
        return costs

    def measure_costs(self, request: Request, seconds: float = SECONDS, progress: OnProgress = unreported) -> Costs:
        """Do what `warm_up` does, for a `Request`; raises what `answer` raises, and `UsageError` for `seconds`."""
        seconds = SECONDS_RANGE.check(seconds)
        check_chosen_after_tower(self.bundle.manifest, request.method)
        self.load_plans(request.method, progress)
        # The first form of an answer reads the tokenizer, which a request with a deadline has no time for.
        self._formed(request)

        def ask(one: Request) -> Answer:
            return self.answer(one).rest()

        return self._keep_measured(lambda: measure_costs(self._model, ask, request, self.place, seconds, progress))
