"""A bundle, loaded: requests in, answers out."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks import check_callable, check_type, checks_options, checks_options_and
from sinkprune.contract.command_line.progress import shown_progress
from sinkprune.contract.progress import OnProgress, reporting, unreported
from sinkprune.deadlines.costs import ANSWER_COSTS, Costs
from sinkprune.deadlines.measuring import (
    MEASURING_COSTS,
    SECONDS,
    SECONDS_RANGE,
    KeepsCosts,
    measure_costs,
    warn_of_load,
)
from sinkprune.deadlines.policy import DeadlinePolicy
from sinkprune.runtime.backends import Backend
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.backends.known import Compute
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.generate import generate
from sinkprune.runtime.hooks import Budgets, Hooks, Rows, Tokens
from sinkprune.runtime.loading import During, StaysInProcess, check_kind, load_model, open_with_backend
from sinkprune.runtime.media.images import Fit, check_fit
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.chain import EncodedPicture, Wrap, encode, run_tower
from sinkprune.runtime.steps.loaded_model import check_chosen_after_tower
from sinkprune.runtime.steps.observer import NOBODY, Observer
from sinkprune.runtime.steps.pictures import PictureLike, decoded
from sinkprune.runtime.steps.request import (
    DEFAULT_NEW_TOKENS,
    REQUEST_OPTIONS,
    Request,
    check_request_options,
    new_request,
)
from sinkprune.runtime.stream import Stream, StreamState
from sinkprune.runtime.text.prompt import Text
from sinkprune.serving.choice_scores import ChoiceTokens
from sinkprune.serving.forms import Grammars


class Answering(ABC):
    """What answers requests. Subclasses build a request, and return the stream of its answer."""

    @abstractmethod
    def new_request(
        self, image: PictureLike | Sequence[PictureLike], prompt: str | Sequence[Text], **options: Any
    ) -> Request:
        """Return the checked request that `stream` answers; takes what `stream` takes, except `observer`.

        The default of `max_new_tokens` is lower where engines were built for shorter answers.
        """

    @abstractmethod
    def answer(self, request: Request, observer: Observer = NOBODY) -> Stream:
        """Return the stream of a request, with each step reported to `observer`; raises what `stream` does."""

    def generate(
        self,
        image: PictureLike | Sequence[PictureLike],
        prompt: str | Sequence[str],
        *,
        on_text: Callable[[str], None] | None = None,
        observer: Observer = NOBODY,
        **options: Any,
    ) -> Answer:
        """Return the whole answer, with the `options` of `stream`. `on_text` receives each piece of text."""
        check_request_options(options, "on_text", "observer")
        if on_text is not None:
            check_callable("on_text", on_text)
        return self.stream(image, prompt, observer=observer, **options).rest(on_text)

    def stream(
        self,
        image: PictureLike | Sequence[PictureLike],
        prompt: str | Sequence[str],
        *,
        observer: Observer = NOBODY,
        **options: Any,
    ) -> Stream:
        """Return the answer's text as a stream of pieces; after the last, `Stream.answer` is the whole `Answer`.

        `image` is a Pillow image, a uint8 [height,width,3] array, a file, a `Clip` or a `VideoFile`, or a list of
        these. `prompt` follows the images. A list of texts surrounds them: one text before each image, and one after
        the last. `options` are the fields of `Request`: `budget`, `method`, `max_new_tokens`, `min_new_tokens`,
        `stop`, `system`, `history`, `tools`, `tool_call_id`, `temperature`, `top_p`, `seed`, `repetition_penalty`,
        `presence_penalty`, `frequency_penalty`, `deadline_ms`, and `schema`, `regex` or `choice` for the form of the
        answer; and `order`, "bgr" for arrays with OpenCV's order of channels. `observer` receives the result of each
        step.

        Raises at once `TypeError`, `UsageError` (`OptionError` for an unknown option), `PromptError`, `BudgetError`,
        and `ImageError` for an object that is no picture. Reading the first piece raises `ImageError`, `PromptError`,
        `PruningError` and `NumericsError`, and later pieces `UsageError` where the tokenizer cannot write the form.
        """
        began = time.perf_counter()
        check_request_options(options, "observer")
        check_type("observer", observer, (Observer,), "an Observer")
        stream = self.answer(self.new_request(image, prompt, **options), observer)
        stream.count_from(began)
        return stream


class Pipeline(StaysInProcess, Answering, KeepsCosts[Costs]):
    """A loaded bundle. Every budget and the unpruned baseline run on the same engines.

    Any number of threads may share a pipeline. Streams may alternate, be closed or be dropped: each answer is the one
    that the request gets alone. On `ort-cpu` threads compute at the same time. On other backends they take turns,
    for a prefill or for one token.

    The parts are public (`family`, `prompts`, `embedding`, `chain`). `family.inputs`, `run_tower`, `encode`,
    `lay_out`, `prefill` and `decode_one_token` run the steps of a request on them, one by one. Threads that call
    these hold `backend.turn`.
    """

    @checks_options
    def __init__(
        self,
        bundle: Bundle,
        backend: Backend,
        built: BuiltEngines | None = None,
        wrap: Wrap | None = None,
        fit: Fit | None = None,
        progress: OnProgress = unreported,
    ) -> None:
        """Load the bundle's graphs on `backend`, or the engines `built` from them; `wrap` may replace each engine."""
        check_kind(bundle, acts=False)
        self.load_ms: float | None = None
        """Milliseconds that `Pipeline.load` took, with the check of sums; None without `Pipeline.load`."""
        self._model = load_model(bundle, backend, built, wrap, fit, progress)
        super().__init__(bundle, backend, ANSWER_COSTS)
        self.limits, self.family = self._model.limits, self._model.family
        self.prompts, self.embedding, self.chain = self._model.prompts, self._model.embedding, self._model.chain
        self._stop = tuple(bundle.manifest.tokens.stop)
        self._grammars = Grammars(self.prompts, self._stop)

    @classmethod
    @checks_options_and(dict.fromkeys(REQUEST_OPTIONS, "Pipeline.generate"))
    def load(
        cls,
        bundle: str | os.PathLike[str] | Bundle,
        *,
        backend: str | None = None,
        threads: int | None = None,
        engines: str | os.PathLike[str] | None = None,
        compute: Compute | None = None,
        check_sums: bool = True,
        sha256: str | None = None,
        engines_sha256: str | None = None,
        signed_by: str | os.PathLike[str] | None = None,
        wrap: Wrap | None = None,
        fit: Fit | None = None,
        during: During = nullcontext,
    ) -> Pipeline:
        """Load a bundle or a folder of engines, by its path or already read; or `engines` built from the bundle.

        `backend` is its name (default: ort-cpu, or the backend of the engines). `fit` is how pictures that
        are not square become square: `crop`, `pad` or `stretch` (default: as the checkpoint does). `compute` is what
        openvino (fastest, bf16, fp32), ort-cpu, ort-cpu+openvino and openvino-gpu (fastest, fp32) compute in
        (default: fastest). `threads` is the number of CPU threads (default: all cores). `wrap` takes a graph's name,
        its engine and the backend when the engine is loaded, and returns what runs in its place.

        `check_sums` compares every file with its sha256 first; sizes are always compared. `sha256` is the expected
        sum of `bundle.json`, and `engines_sha256` that of `engines.json`. `signed_by` is a file with the public key
        of both signatures (`sinkprune-export --sign`). A bundle that does not match is rejected. For a bundle that
        was already read, `read_runnable` has compared them. `during` is a context that is entered with the name of
        each slow part; what it yields is called with the progress, if it can be (`OnProgress`).

        Raises `BundleError`, `EnginesError`, `BackendError` and `UsageError` (`OptionError` for an unknown argument),
        and `TypeError` for an argument of a wrong type.
        """
        check_fit(fit)
        began = time.perf_counter()
        opened = open_with_backend(
            bundle,
            acts=False,
            backend=backend,
            threads=threads,
            engines=engines,
            compute=compute,
            check_sums=check_sums,
            sha256=sha256,
            engines_sha256=engines_sha256,
            signed_by=signed_by,
            wrap=wrap,
            during=during,
        )
        with during("loading the engines") as progress:
            pipeline = cls(*opened, wrap, fit, reporting(progress))
        pipeline.load_ms = (time.perf_counter() - began) * 1e3
        return pipeline

    def answer(self, request: Request, observer: Observer = NOBODY, new_rows: Callable[[], Rows] = Rows) -> Stream:
        """Return the stream of a request, with each step reported to `observer`; raises what `stream` does.

        `new_rows` makes the request's hook for rows of earlier requests.
        """
        began, state = time.perf_counter(), StreamState()
        manifest = self.bundle.manifest
        plan = manifest.plan(request.method, request.budget)
        request, tokens = self._formed(request)
        model = self._model.for_request(request, plan)
        costs = None if request.deadline_ms is None else self._known_costs()
        passes = tokens.passes if isinstance(tokens, ChoiceTokens) else None

        def new_hooks() -> Hooks:
            if request.deadline_ms is None or costs is None:
                budgets = Budgets(manifest, request, plan, None if passes is None else len(passes))
            else:
                budgets = DeadlinePolicy(
                    manifest,
                    request,
                    plan,
                    passes,
                    request.deadline_ms,
                    costs,
                    self._history_of(costs),
                    began=state.began(),
                    first_uses=lambda: self.chain.first_uses,
                )
            return Hooks(budgets, new_rows(), tokens, observer)

        stream = Stream(generate(model, request, new_hooks, state), state)
        stream.count_from(began)
        return stream

    def encode(self, image: PictureLike) -> EncodedPicture:
        """Return an image as the unpruned LLM receives it, with norms and salience; raises `ImageError`."""
        inputs = self.family.inputs(decoded(image, self.family))
        clock = Stopwatch(self.backend)
        with self.backend.turn:
            return encode(self.chain, None, run_tower(self.chain, inputs, clock), clock)

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
        warn_of_load(costs, self.replaced_costs)
        return costs

    def new_request(
        self, image: PictureLike | Sequence[PictureLike], prompt: str | Sequence[Text], **options: Any
    ) -> Request:
        most = self.limits.new_tokens if self.limits else DEFAULT_NEW_TOKENS
        return new_request(image, prompt, **{"max_new_tokens": min(DEFAULT_NEW_TOKENS, most), **options})

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

    def load_plans(self, method: str, progress: OnProgress = unreported) -> None:
        """Load the pruning graphs of all budgets of a method, so that no request waits for them.

        `progress` is called before and after each budget. Raises `BudgetError` for a method that the bundle does not
        have.
        """
        self._model.load_plans(method, progress)

    def _formed(self, request: Request) -> tuple[Request, Tokens]:
        """Return the request with the length of its answer, and the form of its answer."""
        if not request.choice:
            return request, self._grammars.constraint(
                request.schema, request.regex, request.min_new_tokens, request.tools
            )
        ids = tuple(tuple(self.prompts.answer_ids(text)) for text in request.choice)
        choices = ChoiceTokens(tuple(request.choice), ids, self._stop)
        return replace(request, max_new_tokens=max(map(len, ids)), min_new_tokens=0), choices
