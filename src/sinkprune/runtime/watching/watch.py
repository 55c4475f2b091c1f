"""Answers to one instruction for every frame of an endless camera, in constant memory and time."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from sinkprune.contract.checks.arguments import creation_checks_options
from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.checks.ranges import RealNumber, WholeNumber
from sinkprune.contract.errors import ImageError, UsageError
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.plans import Plan
from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import Schedule, schedule
from sinkprune.runtime.deadline.policy import BudgetPolicy
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.families import TowerInput
from sinkprune.runtime.media.picture_warnings import facts_of
from sinkprune.runtime.steps.answer import timings
from sinkprune.runtime.steps.choice_scores import ChoiceTokens
from sinkprune.runtime.steps.context_length import check_length
from sinkprune.runtime.steps.decoding import first_logits, prefill
from sinkprune.runtime.steps.encoding import run_tower
from sinkprune.runtime.steps.kept import surviving_rows
from sinkprune.runtime.steps.loaded_model import LoadedModel, check_counts_known
from sinkprune.runtime.steps.observer import Observer
from sinkprune.runtime.steps.pictures import PictureLike, decoded
from sinkprune.runtime.steps.prompt_rows import PromptRows, lay_out
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.stream import StreamState
from sinkprune.runtime.text.constraint import Unconstrained
from sinkprune.runtime.watching.frame_memory import FrameMemory
from sinkprune.runtime.watching.frame_sanitizer import FrameSanitizer
from sinkprune.runtime.watching.received_attention import received_attention
from sinkprune.runtime.writing import Written, choose, write

_CAPACITY = WholeNumber("capacity", 1, 10**7)
_KEY_EVERY = WholeNumber("key_every", 1, 10**9)
_NOVELTY = RealNumber("novelty", 0, 2, "a distance of cosines, from 0 to 2")
_DECAY = RealNumber("decay", 0, 1, "a factor from 0 to 1")
_RECENT = WholeNumber("recent", 1, 10**6)


@creation_checks_options
@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """What a watch remembers. Raises `UsageError` for values out of range."""

    capacity: int | None = 256
    """The most rows of earlier frames in memory; None for no limit."""
    key_every: int = 30
    """The number of frames from one key frame to the next."""
    novelty: float = 0.2
    """A token is new if 1 - cos to the feature that its place had before is larger."""
    decay: float = 0.9
    """The factor by which the score of each row falls with each frame."""
    recent: int = 2
    """How many of the newest frames keep all their rows."""

    def __post_init__(self) -> None:
        for limits in (_CAPACITY, _KEY_EVERY, _RECENT, _NOVELTY, _DECAY):
            given = getattr(self, limits.name)
            if given is not None or limits is not _CAPACITY:
                # As Python's, because numpy's small integers overflow in sums.
                object.__setattr__(self, limits.name, limits.check(given))


USUAL_SETTINGS = WatchSettings()


@dataclass(frozen=True, eq=False)
class FrameAnswer:
    """The answer to a watch's instruction after one frame. No later frame takes part in it."""

    number: int
    """The frame's number, from 0."""
    key: bool
    """Whether it is a key frame: the budget's sanitizer chose its tokens."""
    text: str
    token_ids: list[int]
    finish: str
    """As `Answer.finish`."""
    new_rows: int
    """The rows that this frame added."""
    evicted: int
    """The rows that were dropped from memory after the answer."""
    tokens: Array = field(repr=False)
    """[V,2] int64: the frame and the token of each visual row that the LLM received."""
    after_stage: Mapping[int, Array] = field(repr=False)
    """By pruning layer: the rows of `tokens` that survived it, ascending."""
    tokens_per_layer: list[int]
    """Visual rows that each decoder layer ran on."""
    ms: dict[str, float | None]
    """Milliseconds by part, as `Answer.ms`."""
    choices: Mapping[str, float] = field(default_factory=dict)
    """As `Answer.choices`."""

    @property
    def confidence(self) -> float | None:
        """The probability of the answer among the request's `choice`; None without one."""
        return self.choices[self.text] if self.choices else None


def check_frames(frames: object) -> None:
    """Raise `TypeError` for anything that does not give pictures one after the other; a single picture does not."""
    one = isinstance(frames, (str, os.PathLike)) or (isinstance(frames, np.ndarray) and frames.ndim < 4)
    if one or not isinstance(frames, Iterable):
        raise TypeError(
            f"frames is {format_value(frames)}, expected pictures one after the other: a list, a generator or a "
            "Camera."
        )


class Watch:
    """Answers each frame's request with the rows that are left of earlier frames.

    The rows of a frame join those in memory, and the decoder runs on all of them with the instruction: the rows of
    the instruction are the probes of the stages, and of the scores by which rows leave the memory. No keys or values
    are kept from one frame to the next, so positions never run out. A frame costs the vision tower, and a pruned
    prefill of at most the capacity and one frame.
    """

    def __init__(
        self,
        model: LoadedModel,
        new_request: Callable[[PictureLike], Request],
        new_form: Callable[[Request], tuple[Request, Unconstrained | ChoiceTokens]],
        settings: WatchSettings,
        observer: Observer,
    ) -> None:
        """Watch with the requests of `new_request`, which returns that of one frame, with its form by `new_form`.

        Raises `BudgetError`, and `UsageError` for a request that cannot watch.
        """
        self._model, self._new_request, self._new_form = model, new_request, new_form
        self._settings, self._observer = settings, observer
        request, backend = new_request(np.zeros((1, 1, 3), np.uint8)), model.chain.backend
        plan = model.manifest.plan(request.method, request.budget)
        if plan is None or not plan.select_after:
            raise UsageError(
                f"a watch needs a budget that prunes inside the decoder, and '{request.budget}' of method "
                f"'{request.method}' does not. Choose another, as in budget='retain-64'."
            )
        check_counts_known(model.manifest, request.method)
        if request.deadline_ms is not None:
            raise UsageError("a watch takes no deadline. A smaller capacity or budget makes each frame faster.")
        if not backend.any_length:
            raise UsageError(
                f"a watch needs engines for any number of rows, and those of backend '{backend.name}' have fixed "
                "ranges. Use ort-cpu, openvino or ort-cuda."
            )
        self._plan: Plan = plan
        self._memory = FrameMemory(backend, settings.capacity, settings.decay, settings.recent)
        self._sanitizer = FrameSanitizer(model.chain, plan, settings.key_every, settings.novelty)
        self._layout: VisualLayout | None = None
        model.chain.load_plan(plan)

    def run(self, frames: Iterable[PictureLike]) -> Iterator[FrameAnswer]:
        """Yield the answer after each frame; raises what `Stream` raises, and `ImageError` for another size."""
        for number, frame in enumerate(frames):
            yield self._answer(number, frame)

    def _answer(self, number: int, frame: PictureLike) -> FrameAnswer:
        family, embedding, chain = self._model.family, self._model.embedding, self._model.chain
        observer, memory, backend = self._observer, self._memory, chain.backend
        request, form = self._new_form(self._new_request(frame))
        if len(request.pictures) != 1:
            raise ImageError(f"frame {number} has {len(request.pictures)} pictures, expected one. Give one a frame.")
        passes = form.passes if isinstance(form, ChoiceTokens) else None
        policy = BudgetPolicy(self._model.manifest, request, passes)
        clock = Stopwatch(backend, observer.during)
        picture = decoded(request.pictures[0], family)
        with clock.measure("ttft"):
            with clock.measure("preprocess"):
                seen = TowerInput(family.inputs(picture), family.layout(picture), facts_of(picture))
                prompt = self._model.encode_prompt(request, [seen.layout])
                sampler = self._model.new_sampler(request, prompt, [seen.layout])
            layout = self._checked_layout(number, seen.layout, request, prompt.text_tokens)
            observer.seen([seen])
            self._model.warnings.warn([layout], [seen.file])
            counts, groups = self._plan.keeps(layout.tokens, layout.groups)
            with backend.turn:
                tower = run_tower(chain, seen.inputs, clock)
                question = self._model.question_ids(self._plan, request, prompt)
                words = backend.tensor(embedding(question)) if question else None
                found = self._sanitizer(tower, counts, groups, clock, words)
                memory.add(number, found, self._settings.novelty)
                encoded = [frame.encoded for frame in memory.frames]
                observer.encoded(encoded)
                texts = [prompt.texts[0], *[()] * (len(memory.frames) - 1), prompt.texts[1]]
                layouts = [layout] * len(encoded)
                rows = lay_out(backend, embedding, family.between_rows, texts, layouts, encoded, pruned=True)
                # The quotas of a bundle for several images count all frames as one.
                rows = replace(rows, picture=np.zeros_like(rows.picture))
                observer.laid_out(rows)
                self._check_positions(number, rows, request)
                result = prefill(chain, self._schedule(request, layout), rows, clock, tower.device_norms)
                logits: Array = backend.numpy(first_logits(chain, result, clock))[0]
                ids = [] if isinstance(form, ChoiceTokens) else [sampler(logits, form.allowed(logits.size))]
        observer.prefilled(result)
        for token in ids:
            observer.chose(token, logits)
        tokens, received = memory.tokens, received_attention(backend, result.scored, rows)
        with backend.turn:
            survivors = surviving_rows(backend, rows, result)
            memory.score(received)
            evicted = memory.evict(number)
        after_stage = {layer: np.flatnonzero(np.isin(rows.visual, left)) for layer, left in survivors.items()}
        layers = result.schedule.per_layer(self._model.manifest.language_model.num_layers)
        state = StreamState()
        steps: Generator[str | None, None, Written]
        if isinstance(form, ChoiceTokens):
            steps = choose(self._model, form, sampler, policy, observer, state, result.cache, logits)
        else:
            steps = write(self._model, request, form, sampler, policy, observer, state, result.cache, ids)
        written = _last(steps)
        return FrameAnswer(
            number=number,
            key=found.key,
            text=written.text,
            token_ids=written.token_ids,
            finish=written.finish,
            new_rows=len(found.sinks),
            evicted=evicted,
            tokens=tokens,
            after_stage=after_stage,
            tokens_per_layer=layers,
            ms=timings(clock.ms(), written.token_ms, written.other_ms),
            choices=written.choices,
        )

    def _checked_layout(self, number: int, layout: VisualLayout, request: Request, text: int) -> VisualLayout:
        """Return the layout of all frames, that of the first; raises `ImageError`, `PromptError`, `UsageError`."""
        first = self._layout
        if first is not None:
            if (layout.size, layout.groups, layout.tokens) != (first.size, first.groups, first.tokens):
                raise ImageError(
                    f"frame {number} has {layout.size[0]}x{layout.size[1]} pixels, expected {first.size[0]}x"
                    f"{first.size[1]}, as the first frame. Scale frames to one size, or start another watch."
                )
            return first
        counts, groups = self._plan.keeps(layout.tokens, layout.groups)
        capacity, of_frame = self._settings.capacity, counts.kept * groups
        least = self._settings.recent * of_frame + counts.sink * groups
        manifest = self._model.manifest
        one_frame = of_frame if layout.places is None else max(of_frame, layout.extent)
        check_length(manifest, self._model.limits, request, text, one_frame, [layout])
        room = manifest.language_model.max_positions - text - request.max_new_tokens
        # In the worst case each row in memory is of another frame, and each frame takes positions of its own.
        most = room - of_frame if layout.places is None else min(room - of_frame, room // layout.extent - 1)
        if capacity is not None and most < least:
            raise UsageError(
                f"the model's {manifest.language_model.max_positions} positions take at most {most} rows of earlier "
                f"frames, if each is of another one, and {self._settings.recent} recent frames of {of_frame} rows at "
                f"budget '{request.budget}' need {least}. Give smaller frames, a smaller budget, fewer recent frames "
                "(recent), or capacity=None, which goes on until the positions are used up."
            )
        if capacity is not None and capacity < least:
            raise UsageError(
                f"capacity is {capacity}, expected at least {least} rows: {self._settings.recent} recent frames of "
                f"{of_frame} rows at budget '{request.budget}', and {counts.sink * groups} for sinks. Raise it, or "
                "choose a smaller budget."
            )
        if capacity is not None and capacity > most:
            raise UsageError(
                f"capacity is {capacity}, expected at most {most} rows: with more, the rows of earlier frames may "
                f"exceed the model's {manifest.language_model.max_positions} positions. Lower it, or leave more "
                "positions: a shorter instruction, or fewer new tokens."
            )
        self._layout = layout
        return layout

    def _check_positions(self, number: int, rows: PromptRows, request: Request) -> None:
        """Raise `UsageError` if a memory without a capacity has outgrown the model's positions."""
        most, needed = self._model.manifest.language_model.max_positions, rows.positions.next + request.max_new_tokens
        if needed > most:
            raise UsageError(
                f"frame {number} and the memory of earlier frames, which has no capacity, need {needed} positions; "
                f"the model has {most}. Give a capacity, as in WatchSettings(capacity=256)."
            )

    def _schedule(self, request: Request, layout: VisualLayout) -> Schedule:
        """Return the schedule of all rows in memory: each stage keeps as many as of one picture."""
        planned = schedule(self._model.manifest, request.method, request.budget, [layout])
        return replace(planned, pictures=(replace(planned.pictures[0], rows=self._memory.rows),))


def _last(steps: Generator[str | None, None, Written]) -> Written:
    """Run `steps` to the end, and return what they return."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
