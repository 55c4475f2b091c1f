"""Measures every budget of a bundle, in turn."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks import WholeNumber
from sinkprune.contract.flops import decode_bytes, prefill_flops
from sinkprune.contract.report import (
    BudgetReport,
    Efficiency,
    EngineHeader,
    PrefillAndTtft,
    ProfileReport,
    ReportHeader,
    Row,
    Spread,
    by_method,
    profile_rows,
)
from sinkprune.contract.schedule import schedule
from sinkprune.runtime.backends import Backend
from sinkprune.runtime.hooks import Observer
from sinkprune.runtime.pipeline import Answering, Pipeline
from sinkprune.runtime.power.meter import EnergyMeter, Span
from sinkprune.runtime.profiling.other_load import OtherLoad
from sinkprune.runtime.steps.answer import PARTS, Answer
from sinkprune.runtime.steps.context_length import check_picture_count, runnable
from sinkprune.runtime.steps.pictures import PictureLike, layout_of, pixels_of

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# "5" resets the peak (VmHWM), proc(5)
_RESET_PEAK = "5"


WHOLE = "request"
"""The name of the peaks of whole requests."""


class PeaksOfStages(Observer):
    """The peaks of resident memory of requests, and of each of their stages while `watching` is True."""

    STAGES = ("vision", "sanitizer", "projector", "prefill", "decode")

    def __init__(self) -> None:
        self.watching = False
        self.bytes: dict[str, int] = {}
        """By the name of the request or the stage, for those that ran; empty if the system does not report it."""

    def during(self, part: str) -> AbstractContextManager[Any]:
        return self.watch(part) if self.watching and part in self.STAGES else nullcontext()

    @contextmanager
    def watch(self, part: str = WHOLE) -> Iterator[None]:
        """Include the peak of the block."""
        try:
            _CLEAR.write_text(_RESET_PEAK)
        except OSError:
            # Without the reset, the peak may be that of an earlier block.
            yield
            return
        yield
        if found := re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text()):
            self.bytes[part] = max(self.bytes.get(part, 0), int(found.group(1)) * 1024)


# The upper limits bound the memory of the answers, which are kept until the report.
REPEAT = WholeNumber("repeat", 1, 100_000)
WARMUP = WholeNumber("warmup", 0, 100_000)
EARLIER = "Describe the picture."
"""The question that a session answers before a warm run."""
NewSession = Callable[[Pipeline], Answering]
"""Makes a session, which keeps its pictures between questions."""
Kind = TypeVar("Kind")
Run = TypeVar("Run")


class Rounds(Generic[Kind, Run]):
    """Runs of several kinds in rounds, each kind once a round. An interrupt of `measure` leaves complete rounds."""

    def __init__(self, kinds: Iterable[Kind]) -> None:
        self._kinds = list(kinds)
        self._first: Run | None = None
        self.other_load: float | None = None
        """The share of the processors that other programs took during `measure`; None if it is unknown."""
        self._rounds: list[dict[Kind, Run]] = []
        """The complete rounds that count."""

    @property
    def count(self) -> int:
        """The number of complete rounds, without warm-up."""
        return len(self._rounds)

    @property
    def kinds(self) -> int:
        """The number of runs of a round."""
        return len(self._kinds)

    def measure(self, repeat: int, warmup: int, on_run: Callable[[str], None]) -> None:
        """Run each kind once in `warmup` rounds that do not count, and in `repeat` rounds that count.

        `on_run` is called with the budget before each run. Raises `UsageError`, and what `Pipeline.generate` or
        `Policy.act` raises.
        """
        repeat, warmup, others = REPEAT.check(repeat), WARMUP.check(warmup), OtherLoad()
        for turn in range(-warmup, repeat):
            # Rotate the order, so that a round's first run favours no kind.
            shift = turn % len(self._kinds)
            found = {}
            for kind in [*self._kinds[shift:], *self._kinds[:shift]]:
                found[kind] = self._run(kind, turn, on_run)
                self._first = self._first or found[kind]
            if turn >= 0:
                self._rounds.append(found)
                self.other_load = others.share()

    def _run(self, kind: Kind, turn: int, on_run: Callable[[str], None]) -> Run:
        raise NotImplementedError


class _Run(NamedTuple):
    answer: Answer
    span: Span
    """From the request to the whole answer."""
    warm_ttft: float | None
    """Milliseconds; None if warm runs are not measured."""


class ProfileRounds(Rounds[Row, _Run]):
    """Runs of the unpruned engines and of `method` at all `budgets`. A bundle's `BASELINES` run too.

    Every answer has exactly `new_tokens`: stop tokens are ignored. With `new_session`, each run is followed by the
    same request in a new session that has answered `EARLIER`. `meter` measures the joules of every run. If its sensor
    dies, later runs have none, and the report has the reason.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        image: PictureLike | Sequence[PictureLike],
        prompt: str | Sequence[str],
        budgets: Sequence[str],
        *,
        method: str,
        new_tokens: int,
        new_session: NewSession | None = None,
        meter: EnergyMeter | None = None,
    ) -> None:
        """Check the requests; raises `UsageError`, also for engines that `new_session` rejects.

        Raises what `Pipeline.generate` raises before it runs.
        """
        if new_session is not None:
            new_session(pipeline)
        super().__init__(profile_rows(pipeline.bundle.manifest.plans, method, budgets))
        self._pipeline, self._image, self._prompt = pipeline, image, prompt
        self._method, self._new_tokens, self._new_session, self._meter = method, new_tokens, new_session, meter
        self._memory = {row: PeaksOfStages() for row in self._kinds}
        for each, own in by_method(self._memory).items():
            check_budgets(pipeline, image, prompt, list(own), method=each, new_tokens=new_tokens)

    def _run(self, row: Row, turn: int, on_run: Callable[[str], None]) -> _Run:
        on_run(row.budget)
        memory, pipeline = self._memory[row], self._pipeline
        # In earlier rounds, and in the first of all without any, memory depends on the order of the rows.
        memory.watching = turn == 0
        with memory.watch():
            began = time.monotonic()
            answer = pipeline.generate(
                self._image,
                self._prompt,
                budget=row.budget,
                method=row.method,
                max_new_tokens=self._new_tokens,
                min_new_tokens=self._new_tokens,
                observer=memory,
            )
            span = Span(began, time.monotonic())
        return _Run(answer, span, self._warm_ttft(row))

    def _warm_ttft(self, row: Row) -> float | None:
        """Return the milliseconds to the first token of a request whose pictures a session knows from `EARLIER`."""
        if self._new_session is None:
            return None
        session, prompt = self._new_session(self._pipeline), self._prompt
        options: dict[str, Any] = {**row._asdict(), "max_new_tokens": 1}
        session.generate(self._image, EARLIER if isinstance(prompt, str) else [*prompt[:-1], EARLIER], **options)
        return session.generate(self._image, prompt, **options).ms["ttft"]

    def report(self) -> ProfileReport:
        """Return the report of the complete rounds, one at least."""
        pipeline, meter = self._pipeline, self._meter
        runs = {row: [found[row] for found in self._rounds] for row in self._kinds}
        unpruned = runs[Row(self._method, UNPRUNED)]
        answer = unpruned[0].answer
        rows = {row: _budget_report(pipeline, self._memory[row], own, unpruned, meter) for row, own in runs.items()}
        reports, load, first = by_method(rows), pipeline.load_ms, self._first and self._first.answer.ms["ttft"]
        return ProfileReport(
            **vars(report_header(pipeline, self._method, answer.prompt_tokens, self._new_tokens, meter)),
            repeat=self.count,
            other_load=self.other_load,
            first_answer_ms=None if load is None or first is None else load + first,
            seen_share=tuple(kept.layout.seen_share for kept in answer.images),
            budgets=reports.pop(self._method),
            baselines=reports,
        )


def check_budgets(
    pipeline: Pipeline,
    image: PictureLike | Sequence[PictureLike],
    prompt: str | Sequence[str],
    budgets: Sequence[str],
    *,
    method: str,
    new_tokens: int,
) -> None:
    """Check that the request can run at each of `budgets`, before any runs.

    Raises what `Pipeline.generate` raises for the largest budget that cannot run.
    """
    manifest, family = pipeline.bundle.manifest, pipeline.family
    request = pipeline.new_request(image, prompt, method=method, max_new_tokens=new_tokens)
    check_picture_count(manifest, pipeline.limits, len(request.pictures))
    layouts = [layout_of(pixels_of(source, family), source, family) for source in request.pictures]
    text = pipeline.prompts.encode(request.texts, [layout.texts for layout in layouts], request.system).text_tokens
    schedules = [schedule(manifest, method, budget, layouts) for budget in budgets]
    for planned in sorted(schedules, key=lambda planned: -planned.rows):
        runnable(manifest, pipeline.limits, request, [planned], text, layouts)


def report_header(
    pipeline: Pipeline, method: str, prompt_tokens: int, new_tokens: int, meter: EnergyMeter | None
) -> ReportHeader:
    """Return the head of a report about `pipeline`, with the readings of `meter` so far."""
    head = vars(engine_header(pipeline, method, prompt_tokens))
    return ReportHeader(**head, new_tokens=new_tokens, power=None if meter is None else meter.report())


class Loaded(Protocol):
    """A loaded bundle."""

    bundle: Bundle
    backend: Backend
    load_ms: float | None


def engine_header(loaded: Loaded, method: str, prompt_tokens: int) -> EngineHeader:
    """Return the head of a report about a loaded bundle."""
    manifest, backend = loaded.bundle.manifest, loaded.backend
    return EngineHeader(
        model=model_name(manifest.checkpoint.source),
        backend=backend.name,
        precision=manifest.precision,
        weights=manifest.weights,
        compute=backend.compute,
        cache=backend.cache,
        method=method,
        machine=backend.machine,
        threads=backend.threads,
        prompt_tokens=prompt_tokens,
        load_ms=loaded.load_ms,
        versions=used_versions(backend),
        captured=backend.captured(),
    )


def used_versions(backend: Backend) -> dict[str, str]:
    """Return the versions of sinkprune, Python and the engine library, by name."""
    return {"sinkprune": version("sinkprune"), "python": platform.python_version(), **backend.versions}


def model_name(source: str) -> str:
    """Return a hub or preset name unchanged, and a local path without its parents."""
    return Path(source).name if Path(source).is_absolute() else source


def _measured(runs: Sequence[Answer]) -> dict[str, Spread | None]:
    values = {part: [ms for run in runs if (ms := run.ms[part]) is not None] for part in PARTS}
    return {part: Spread.of(known) if known else None for part, known in values.items()}


def _flops(pipeline: Pipeline, answer: Answer) -> PrefillAndTtft:
    model = pipeline.bundle.manifest.language_model
    tokens = [visual + answer.prompt_tokens for visual in answer.tokens_per_layer]
    decoder = prefill_flops(model, tokens)
    encoder = sum(kept.layout.tower_flops + kept.layout.projector_flops * kept.index.size for kept in answer.images)
    return PrefillAndTtft(decoder, decoder + encoder)


def _budget_report(
    pipeline: Pipeline,
    memory: PeaksOfStages,
    runs: Sequence[_Run],
    unpruned: Sequence[_Run],
    meter: EnergyMeter | None,
) -> BudgetReport:
    answer, base = runs[0].answer, unpruned[0].answer
    ms, base_ms = _measured([run.answer for run in runs]), _measured([run.answer for run in unpruned])
    flops, base_flops = _flops(pipeline, answer), _flops(pipeline, base)
    flops_speedup = PrefillAndTtft(base_flops.prefill / flops.prefill, base_flops.ttft / flops.ttft)
    speedup = PrefillAndTtft(*(ratio(base_ms[part], ms[part]) for part in ("prefill", "ttft")))
    per_token = ms["per_token"]
    step_bytes = decode_bytes(pipeline.bundle.manifest, answer.kv_bytes)
    stages = {stage: memory.bytes[stage] for stage in memory.STAGES if stage in memory.bytes}
    warm = [run.warm_ttft for run in runs if run.warm_ttft is not None]
    return BudgetReport(
        visual_tokens=answer.visual_tokens,
        kept_after_sanitizer=answer.tokens_per_layer[0],
        tokens_per_layer=tuple(answer.tokens_per_layer),
        mean_visual_tokens=sum(answer.tokens_per_layer) / len(answer.tokens_per_layer),
        ms=ms,
        flops=flops,
        flops_speedup=flops_speedup,
        speedup=speedup,
        efficiency=Efficiency(speedup.prefill / flops_speedup.prefill),
        kv_bytes=answer.kv_bytes,
        # Watching a stage resets the peak of the whole.
        peak_rss_bytes=max(memory.bytes.values(), default=None),
        stage_peak_rss_bytes=stages,
        decode_tokens_per_s=1e3 / per_token.median if per_token else None,
        decode_gb_per_s=step_bytes / per_token.median / 1e6 if per_token else None,
        energy=meter.budget_energy([run.span for run in runs]) if meter else None,
        warm_ttft_ms=Spread.of(warm) if warm else None,
    )


def ratio(slow: Spread | None, fast: Spread | None) -> float:
    """Return how many times as long `slow` takes, by medians; both must have been measured."""
    if slow is None or fast is None:
        raise ValueError("prefill and ttft are measured in every run")
    return slow.median / fast.median
