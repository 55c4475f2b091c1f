"""Measures what requests cost on this machine: whole requests at each budget, and the decoder alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from sinkprune.contract.checks.ranges import RealNumber
from sinkprune.contract.costs.model import COSTS_VERSION, Costs, Place, fit_measured
from sinkprune.contract.errors import UsageError
from sinkprune.contract.reports.progress import OnProgress, unreported
from sinkprune.contract.reports.report import PARTS
from sinkprune.contract.schedule import Schedule, schedules_up_to
from sinkprune.runtime.deadline.decoder_times import DecoderTimes
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.context_length import check_picture_count, runnable
from sinkprune.runtime.steps.loaded_model import LoadedModel
from sinkprune.runtime.steps.pictures import decoded
from sinkprune.runtime.steps.request import Request

MEASURING_COSTS = "measuring what budgets cost on this machine"
"""The work of a warm-up, as progress names it."""
SECONDS = 2.0
"""About how long a measurement repeats, unless its fewest rounds take longer."""
SECONDS_RANGE = RealNumber("seconds", 0, 86_400, "a number of seconds, from 0 to 86400 (a day)")
_ROUNDS = (3, 100)
"""The fewest and the most rounds, however long a round takes."""
_COUNTS = 6
_FAR_TOO_SLOW = 2.0

_Ms = Mapping[str, float | None]
Ask = Callable[[Request], Answer]
"""Returns the whole answer of a request."""


def measure_costs(
    model: LoadedModel,
    ask: Ask,
    request: Request,
    place: Place,
    seconds: float = SECONDS,
    progress: OnProgress = unreported,
) -> Costs:
    """Return the costs of requests like this one at this `place`, as medians over about `seconds`.

    Whole requests and the decoder alone run in turn. Whole requests leave out larger budgets whose first token takes
    far longer than the request's deadline. The decoder runs on several numbers of rows, from those of the smallest to
    those of the largest budget. Raises what a request raises.
    """
    manifest, family = model.manifest, model.family
    if not request.pictures:
        raise UsageError(
            "costs are those of pictures, and the request has none. Give one like those of your requests."
        )
    check_picture_count(manifest, model.limits, len(request.pictures))
    pictures = tuple(decoded(source, family) for source in request.pictures)
    layouts = [*map(family.layout, pictures)]
    text = model.encode_prompt(request, layouts).text_tokens
    plain = replace(request.for_one_token(), pictures=pictures, temperature=0.0)
    candidates = schedules_up_to(manifest, request.method, request.budget, layouts)
    possible = runnable(manifest, model.limits, plain, candidates, text, layouts)[::-1]
    requests = _fast_enough(ask, plain, possible, request.deadline_ms or float("inf"), progress)
    planned = possible[: len(requests)]
    least = min(one.reaching(manifest.language_model.num_layers) for one in planned)
    # The costs serve later deadlines too, with which larger budgets may run.
    most = max(choice.rows for choice in possible)
    counts = {round(count) for count in np.geomspace(text + least, text + most, _COUNTS)}
    decoder, runs = DecoderTimes(model.chain, model.embedding, [*counts]), [list[_Ms]() for _ in requests]
    rounds = MeasurementRounds("measuring costs", seconds, len(requests) + 1, progress)
    for counted in rounds:
        for each, own in zip(requests, runs, strict=True):
            answered = ask(each).ms
            rounds.complete_part()
            if counted:
                own.append(answered)
        decoder.run(counted=counted)
    found = [{part: median(ms[part] or 0.0 for ms in own) for part in PARTS} for own in runs]

    points: dict[str, list[tuple[float, float]]] = {"sanitizer": [], "projector": [], "select": []}
    segments, number, rest = decoder.segments, len(pictures), []
    for one, ms in zip(planned, found, strict=True):
        points["sanitizer"].append((one.rows / number, ms["sanitizer"] / number))
        points["projector"].append((one.rows / number, ms["projector"] / number))
        if one.plan is not None and one.plan.cuts:
            rows = text + sum(map(one.reaching, one.plan.cuts)) / len(one.plan.cuts)
            points["select"].append((rows, ms["select"] / len(one.plan.cuts)))
        alone = sum(
            curve.ms(text + one.reaching(layers.start))
            for layers, curve in zip(manifest.segments, segments, strict=True)
        )
        rest.append(ms["rest"] + ms["prefill"] - ms["select"] - alone)
    tokens = sum(layout.all_tokens for layout in layouts) / number
    tower = median(ms["preprocess"] + ms["vision"] for ms in found) / number
    return Costs(
        costs_version=COSTS_VERSION,
        place=place,
        tower=fit_measured([(tokens, tower)]),
        sanitizer=fit_measured(points["sanitizer"]),
        projector=fit_measured(points["projector"]),
        decoders=segments,
        select=fit_measured(points["select"]),
        rest=max(0.0, median(rest)),
        token=decoder.token,
        token_start=decoder.token_start,
        pass_row=decoder.pass_row,
        most_rows=text + most,
    )


class MeasurementRounds:
    """The rounds of a measurement of about some seconds. Iteration yields whether a round counts: the first does not,
    because it is a warm-up.
    """

    def __init__(self, what: str, seconds: float, parts: int, progress: OnProgress) -> None:
        """Report each of the `parts` of a round to `progress`, as parts of the work `what`."""
        self._what, self._seconds, self._parts, self._progress = what, seconds, parts, progress
        self._done, self._total = 0.0, 1 + _ROUNDS[0]

    def __iter__(self) -> Iterator[bool]:
        yield False
        began = time.perf_counter()
        for number in range(1, _ROUNDS[1] + 1):
            self._report(number)
            yield True
            passed = time.perf_counter() - began
            self._total = 1 + min(max(_ROUNDS[0], round(number * self._seconds / passed)), _ROUNDS[1])
            if number >= _ROUNDS[0] and passed >= self._seconds:
                return

    def complete_part(self) -> None:
        """Report that a part of the present round is done."""
        self._report(self._done + 1 / self._parts)

    def _report(self, done: float) -> None:
        self._done = done
        self._progress(self._what, done, max(done, self._total), "rounds")


def _fast_enough(
    ask: Ask, plain: Request, possible: Sequence[Schedule], most_ms: float, progress: OnProgress
) -> list[Request]:
    """Return the request at the smallest of the `possible` budgets, and at all before the first far above `most_ms`.

    `possible` are ordered from the smallest to the largest.
    """
    requests: list[Request] = []
    for number, choice in enumerate(possible):
        progress("trying budgets", number, len(possible), "budgets")
        request = replace(plain, budget=choice.budget)
        # Warm-up: an engine's first run is slower.
        ask(request)
        if requests and (ask(request).ms["ttft"] or 0.0) > _FAR_TOO_SLOW * most_ms:
            break
        requests.append(request)
    return requests
