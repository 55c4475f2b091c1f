"""Measures the costs of a loaded bundle, and keeps them for the next time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Generic

import numpy as np

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks import RealNumber, check_type, format_value, warn_user
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.errors import CostsWarning, UsageError
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import Array
from sinkprune.contract.progress import OnProgress, unreported
from sinkprune.contract.schedule import Schedule
from sinkprune.deadlines.costs import (
    COSTS_VERSION,
    C,
    Costs,
    Curve,
    MeasuredCosts,
    Place,
    cache_costs,
    fit_measured,
    not_kept,
)
from sinkprune.deadlines.policy import RequestHistory, schedules_up_to
from sinkprune.runtime.backends import Backend
from sinkprune.runtime.loading import LoadedModel
from sinkprune.runtime.profiling.other_load import OtherLoad
from sinkprune.runtime.steps.answer import PARTS, Answer
from sinkprune.runtime.steps.chain import Chain
from sinkprune.runtime.steps.context_length import check_picture_count, runnable
from sinkprune.runtime.steps.decoding import KVCache, decode_one_token
from sinkprune.runtime.steps.pictures import decoded
from sinkprune.runtime.steps.prompt_rows import Embedding
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.steps.scored_rows import logits_of_rows

MEASURING_COSTS = "measuring what budgets cost on this machine"
"""The work of a warm-up, as progress names it."""
SECONDS = 2.0
"""About how long a measurement repeats, unless its fewest rounds take longer."""
SECONDS_RANGE = RealNumber("seconds", 0, 86_400, "a number of seconds, from 0 to 86400 (a day)")
_ROUNDS = (3, 100)
"""The fewest and the most rounds, however long a round takes."""
_COUNTS = 6
_FAR_TOO_SLOW = 2.0
_TOKENS = 8
"""The number of tokens after each prefill."""
_START = 4
"""How many of these are at the start (`Costs.token_start`)."""
_PASS = 8
"""The rows of a pass after them, as for an answer of a closed list."""


class DecoderTimes:
    """Milliseconds of the decoder on rows of text; the time does not depend on the content of rows."""

    def __init__(self, chain: Chain, embedding: Embedding, counts: Sequence[int]) -> None:
        """Prepare prefills of each of `counts` rows."""
        self._chain, self._counts = chain, sorted(counts)
        rows = embedding(range(min(max(counts), chain.model.vocab_size)))
        self._rows: Array = np.resize(rows, (max(counts), rows.shape[1]))
        self.prefills: dict[int, list[tuple[float, ...]]] = defaultdict(list)
        """By count of rows: the milliseconds of each prefill in each segment."""
        self.tokens: dict[int, list[list[float]]] = defaultdict(list)
        """By count of rows: the milliseconds of the tokens after each prefill, with the head."""
        self._rows_of_passes: list[float] = []
        """The milliseconds of each row after the first, in passes over `_PASS` rows after the tokens."""

    def run(self, *, counted: bool) -> None:
        """Run a prefill of each count, and tokens after it; store the times if `counted`."""
        for count in self._counts:
            self._run(count, counted=counted)
        # Reverse the order, so that neither a larger nor a smaller predecessor favours a count.
        self._counts.reverse()

    @property
    def segments(self) -> tuple[Curve, ...]:
        """For each segment: the time of a prefill by its number of rows."""
        return tuple(
            fit_measured([(count, median(run[segment] for run in runs)) for count, runs in self.prefills.items()])
            for segment in range(len(self._chain.decoders))
        )

    @property
    def token(self) -> Curve:
        """The time of a token after the first few, by the number of rows of the prefill before it."""
        return fit_measured([(count, median(self.late(count))) for count in self.tokens])

    def late(self, count: int) -> list[float]:
        """Return the mean milliseconds of the later tokens, after each prefill of `count` rows."""
        return [_late(run) for run in self.tokens[count]]

    @property
    def token_start(self) -> tuple[float, ...]:
        """The times of the first few tokens, as `Costs.token_start`."""
        runs = [run for runs in self.tokens.values() for run in runs]
        return tuple(median(run[number] / _late(run) for run in runs) for number in range(_START))

    @property
    def pass_row(self) -> float:
        """The milliseconds of a further row of a pass, as `Costs.pass_row`."""
        return max(0.0, median(self._rows_of_passes))

    def _run(self, count: int, *, counted: bool) -> None:
        chain, backend = self._chain, self._chain.backend
        cos, sin = (backend.tensor(table) for table in chain.rotary.tables(np.arange(count)))
        hidden, added = backend.tensor(self._rows[None, :count]), chain.deepstack_zeros(count)
        caches, spans = [], []
        for decoder in chain.decoders:
            cache, start = decoder.new_cache(), backend.mark()
            hidden = decoder({"hidden": hidden, "cos": cos, "sin": sin, **added}, cache)["hidden_out"]
            # Only the first segment takes these.
            added = {}
            spans.append((start, backend.mark()))
            caches.append(cache)
        backend.numpy(chain.last({"hidden": hidden})["logits"])
        written, tokens = KVCache(caches, [count] * len(caches)), []
        for _ in range(_TOKENS):
            began = time.perf_counter()
            backend.numpy(decode_one_token(chain, written, self._rows[0]))
            tokens.append((time.perf_counter() - began) * 1e3)
        began = time.perf_counter()
        for _ in logits_of_rows(chain, written, np.resize(self._rows, (_PASS, self._rows.shape[1]))):
            pass
        passed = (time.perf_counter() - began) * 1e3
        if counted:
            self._rows_of_passes.append((passed - _late(tokens)) / (_PASS - 1))
            self.prefills[count].append(tuple(backend.elapsed_ms(*span) for span in spans))
            self.tokens[count].append(tokens)


def _late(tokens: Sequence[float]) -> float:
    return fmean(tokens[_START:])


class KeepsCosts(Generic[C]):
    """What pipelines and policies have in common: costs that later processes find."""

    def __init__(self, bundle: Bundle, backend: Backend, kind: type[C]) -> None:
        """Hold no costs of this `kind` yet, of `bundle` on `backend`."""
        self.bundle, self.backend = bundle, backend
        self._kind = kind
        self.costs: C | None = None
        """What requests cost on this machine, for those with a deadline. `warm_up` measures it. Without it, the first
        such request reads earlier costs from the user's cache folder."""
        self._history: tuple[C, RequestHistory] | None = None

    @property
    def place(self) -> Place:
        """The model, backend, threads and processor that costs must match to be valid here; see `read_costs`."""
        return place_of(self.bundle.manifest, self.backend)

    def save_costs(self) -> Path | None:
        """Write `costs`, and how recent requests with a deadline compare with them, to the user's cache folder.

        Later processes then expect what this one expects. Return the file, or None without costs or where the folder
        cannot be written. It takes milliseconds, so call it when no request waits.

        Warns with `CostsWarning` if the folder cannot be written. Raises `UsageError` for costs of another place, and
        `TypeError` for what are no costs.
        """
        if self.costs is None:
            return None
        costs = self._checked(self.costs)
        return self._cache(replace(costs, recent=self._history_of(costs).recent))

    def _keep_measured(self, measure: Callable[[], C]) -> C:
        """Measure `costs` and the load meanwhile, and cache them if possible."""
        with self.backend.turn:
            others = OtherLoad()
            found = measure()
        self.costs = replace(found, measured_at=time.time(), load=others.share())
        self._cache(self.costs)
        return self.costs

    def _cache(self, costs: C) -> Path | None:
        """Write costs to the user's cache folder, and return the file; else warn, and return None."""
        file = cache_costs(costs)
        if file is None:
            warn_user(not_kept(costs), CostsWarning)
        return file

    def _known_costs(self, method: str = "") -> C:
        """Return `costs`, or those of the cache folder (of actions, of a `method`); raises `UsageError`."""
        self.costs = self._kind.cached(self.place, method) if self.costs is None else self.costs
        if self.costs is None:
            raise self._kind.missing(self.place, method)
        return self._checked(self.costs)

    def _checked(self, costs: C) -> C:
        kind = self._kind
        check_type("costs", costs, (kind,), f"{kind.__name__}, as {kind.reader} and warm_up return")
        costs.check_place(self.place, "the costs")
        return costs

    def _history_of(self, costs: C) -> RequestHistory:
        """Return the history of requests compared with these `costs`; it starts anew with other costs."""
        if self._history is None or self._history[0] is not costs:
            self._history = costs, RequestHistory(costs.recent)
        return self._history[1]


def warn_of_load(costs: MeasuredCosts) -> None:
    """Warn with `CostsWarning` of `costs` that a busy machine measured."""
    if costs.load_doubt:
        warn_user(
            f"the costs {costs.load_doubt}. Measure them again with warm_up when the machine is idle.", CostsWarning
        )


def place_of(manifest: Manifest, backend: Backend) -> Place:
    """Return the model, backend and machine for which costs of this bundle on this backend are valid."""
    return Place(
        config_sha256=manifest.checkpoint.config_sha256,
        cut_after=manifest.cut_after,
        precision=manifest.precision,
        weights=manifest.weights.name,
        backend=backend.name,
        compute=backend.compute,
        threads=backend.threads,
        machine=backend.machine,
    )


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
        what = "costs are those of pictures, and the request has none"
        raise UsageError(f"{what}. Give one like those of your requests.")
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
    decoder = DecoderTimes(model.chain, model.embedding, [*counts])
    runs = [list[Mapping[str, float | None]]() for _ in requests]
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
        for part in ("sanitizer", "projector"):
            points[part].append((one.rows / number, ms[part] / number))
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
        select=fit_measured(points["select"]),
        decoders=segments,
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
    """Return the request at the first of the `possible` budgets, and at all before the first far above `most_ms`."""
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


@contextmanager
def shown_progress(text: str, progress: bool | OnProgress) -> Iterator[OnProgress]:
    """Yield the function for the progress of the block, by the argument `progress` of a Python function.

    True shows what `status` shows for `text`, False nothing. A function is yielded as it is. Raises `TypeError` for
    anything else.
    """
    if progress is True:
        with status(text) as report:
            yield report
    elif progress is not False and not callable(progress):
        raise TypeError(f"progress is {format_value(progress)}, expected True, False or a function.")
    else:
        yield progress or unreported
