"""The time of one request with any budget on this machine: predicted from costs, and measured."""

from __future__ import annotations

from collections.abc import Sequence

from sinkprune.calibration.evaluation.report import Combination
from sinkprune.calibration.scheduling.named_budget import METHOD
from sinkprune.calibration.scheduling.questions import PictureQuestion
from sinkprune.calibration.scheduling.search import LatencyPrice
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.costs.model import predict
from sinkprune.contract.reports.progress import OnProgress, unreported
from sinkprune.contract.reports.report import Spread
from sinkprune.contract.schedule import Schedule, schedule
from sinkprune.runtime.deadline.cost_measuring import MeasurementRounds
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.request import new_request

UNPRUNED_MODEL = Combination(METHOD, UNPRUNED)


class RequestTimes:
    """The times of a request with the budgets of a pipeline's bundle, in milliseconds to the last new token."""

    def __init__(
        self, pipeline: Pipeline, prompt: PictureQuestion, seconds: float, progress: OnProgress = unreported
    ) -> None:
        """Measure the costs of the request for some `seconds`; raises what a request raises."""
        self._pipeline, self._prompt, self._seconds, self._progress = pipeline, prompt, seconds, progress
        request = new_request(*prompt, method=METHOD)
        self.costs = pipeline.measure_costs(request, seconds, progress)
        """Medians, at the machine's speed of the last measurement."""
        self.p95_ratio = 1.0
        """The 95th percentile of the last measured times, as a multiple of their median; 1 before the first."""
        self.requests = 0
        """The requests of each combination of the last measured times."""
        self._measured = 0
        self.layout = pipeline.family.layout(prompt.image)
        self.text_tokens = pipeline.prompts.encode(request.texts).text_tokens

    def schedule(self, combination: Combination) -> Schedule:
        """Return the rows that the method and budget keep of the picture."""
        return schedule(self._pipeline.bundle.manifest, *combination, [self.layout])

    def price(self, new_tokens: int) -> LatencyPrice:
        """Return the median time of all plans of the bundle's cuts."""
        manifest = self._pipeline.bundle.manifest
        layers, projector = tuple(map(len, manifest.segments)), manifest.projector is not None
        return LatencyPrice(self.costs, layers, self.text_tokens, self.layout.all_tokens, projector, new_tokens)

    def predict(self, combination: Combination, new_tokens: int) -> float:
        """Return the median time of an answer with `new_tokens`, from the costs."""
        manifest = self._pipeline.bundle.manifest
        predicted = predict(self.costs, manifest, self.schedule(combination), self.text_tokens)
        tower_ms: float = self.costs.tower.ms(self.layout.all_tokens)
        return tower_ms + predicted.whole(new_tokens)

    def measure(self, combinations: Sequence[Combination], new_tokens: int) -> list[Spread]:
        """Return the measured times of each combination; the combinations take turns in each round."""
        latencies = [list[float]() for _ in combinations]
        # A name of its own: what follows counts its rounds anew.
        self._measured += 1
        what = f"measuring budgets, try {self._measured}" if self._measured > 1 else "measuring budgets"
        rounds = MeasurementRounds(what, self._seconds, len(combinations), self._progress)
        for counted in rounds:
            for (method, budget), own in zip(combinations, latencies, strict=True):
                answer = self._pipeline.generate(
                    *self._prompt,
                    method=method,
                    budget=budget,
                    max_new_tokens=new_tokens,
                    min_new_tokens=new_tokens,
                )
                rounds.complete_part()
                if counted:
                    own.append(answer.ms["latency"] or 0.0)
        self.requests = len(latencies[0])
        return [Spread.of(own) for own in latencies]

    def measure_unpruned(self, new_tokens: int) -> Spread:
        """Measure the unpruned model, and correct the predictions by it."""
        predicted = self.predict(UNPRUNED_MODEL, new_tokens)
        (measured,) = self.measure([UNPRUNED_MODEL], new_tokens)
        self.correct(measured, predicted)
        return measured

    def correct(self, measured: Spread, predicted_ms: float) -> None:
        """Scale the costs to the speed at which a request was `measured`, and note how slow the slowest were."""
        self.costs = self.costs.slower(measured.median / predicted_ms)
        self.p95_ratio = measured.p95 / measured.median
