"""The options of `sinkprune-run` for deadlines. What they need is imported where a deadline is given."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.command_line.options import CommandParser
from sinkprune.contract.command_line.progress import status
from sinkprune.runtime.commands.options import NO_COSTS, Options, add_costs, explain_interrupt
from sinkprune.runtime.commands.run import RunExtension
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.pictures import PictureLike
from sinkprune.runtime.steps.request import DEADLINE_MS, Request

if TYPE_CHECKING:
    from sinkprune.deadlines.costs import Costs


class DeadlineOptions(RunExtension):
    """`--deadline-ms`, `--warm-up` and `--costs` of `sinkprune-run`."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.reads = [options.costs] if options.costs else []
        self.chooses_budget = self.warms_up = options.deadline_ms is not None
        self._costs: Costs | None = None

    def check(self) -> None:
        options = self.options
        if options.costs or options.warm_up:
            from sinkprune.deadlines.options import check_cost_options

            check_cost_options(options.warm_up, options.costs, options.deadline_ms)

    @staticmethod
    def add_options(parser: CommandParser) -> None:
        add = parser.group("budget").add_argument
        add(
            "--deadline-ms",
            type=DEADLINE_MS,
            metavar="MS",
            help="milliseconds for the whole answer. Chooses the largest budget whose predicted time for "
            "--max-new-tokens tokens meets them. Needs --warm-up once on this machine, or --costs",
        )
        add(
            "--warm-up",
            action="store_true",
            help="measure the costs of requests on this machine before the answer, and keep them for later runs; "
            "takes seconds, or minutes for a large model",
        )
        add_costs(parser)

    def fields(self) -> dict[str, Any]:
        return {"deadline_ms": self.options.deadline_ms}

    def opened(self, bundle: Bundle) -> type[Pipeline]:
        if not self.chooses_budget:
            return Pipeline
        from sinkprune.deadlines.options import costs_before_loading
        from sinkprune.deadlines.pipeline import Pipeline as DeadlinePipeline
        from sinkprune.deadlines.policy import check_chosen_after_tower

        check_chosen_after_tower(bundle.manifest, self.options.method)
        if not self.options.warm_up:
            self._costs = costs_before_loading(self.options, self.options.costs, bundle)
        return DeadlinePipeline

    def loaded(self, pipeline: Pipeline, request: Request, sources: Sequence[PictureLike]) -> Request:
        if not self.chooses_budget:
            return request
        from sinkprune.deadlines.measuring import MEASURING_COSTS
        from sinkprune.deadlines.options import run_once
        from sinkprune.deadlines.pipeline import Pipeline as DeadlinePipeline

        assert isinstance(pipeline, DeadlinePipeline)
        pipeline.costs = self._costs
        if self.options.warm_up:
            with explain_interrupt(NO_COSTS), status(MEASURING_COSTS) as progress:
                pipeline.measure_costs(request, progress=progress)
        with status("loading the budgets' graphs") as progress:
            pipeline.load_plans(self.options.method, progress)
        if not self.options.warm_up:
            # The first request of a process is slower than its costs say.
            with status("running the request once before it counts"):
                run_once(pipeline, request)
        # A deadline counts the reading of the pictures, so they are read anew.
        return replace(request, pictures=tuple(sources))

    def lines(self, answer: Answer) -> str:
        if answer.deadline is None:
            return ""
        from sinkprune.deadlines.options import in_time_line

        return in_time_line(answer, answer.deadline)

    def answered(self, pipeline: Pipeline, answer: Answer) -> None:
        if answer.deadline is None:
            return
        from sinkprune.deadlines.options import late_line, saved_costs_lines
        from sinkprune.deadlines.pipeline import Pipeline as DeadlinePipeline

        if isinstance(pipeline, DeadlinePipeline):
            sys.stderr.write(late_line(answer.deadline))
            sys.stderr.write(saved_costs_lines(pipeline, self.options, measured=self.options.warm_up))
