"""A bundle, loaded: requests in, answers out."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from sinkprune.contract.budgets import Plan
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks import check_callable, check_type, checks_options, checks_options_and, shows_fields
from sinkprune.contract.errors import UsageError
from sinkprune.contract.progress import OnProgress, reporting, unreported
from sinkprune.contract.registry import Registry
from sinkprune.runtime.backends import Backend
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.families import Fit, check_fit
from sinkprune.runtime.generate import generate
from sinkprune.runtime.hooks import NOBODY, Budgets, Hooks, Observer, Rows, Tokens
from sinkprune.runtime.loading import LoadOptions, StaysInProcess, check_kind, load_model
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.chain import EncodedPicture, Wrap, encode, run_tower
from sinkprune.runtime.steps.pictures import PictureLike, decoded
from sinkprune.runtime.steps.request import (
    DEFAULT_NEW_TOKENS,
    REQUEST_OPTIONS,
    Request,
    check_request_options,
    new_request,
)
from sinkprune.runtime.stream import Stream, StreamState
from sinkprune.runtime.text.prompt import PromptEncoder, Text

if TYPE_CHECKING:
    from sinkprune.runtime.backends.compatibility import BuiltEngines


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
        check_request_options(options, "on_text", "observer")
        check_type("observer", observer, (Observer,), "an Observer")
        stream = self.answer(self.new_request(image, prompt, **options), observer)
        stream.count_from(began)
        return stream


P = TypeVar("P", bound="Pipeline")
Form = Callable[[Request], tuple[Request, Tokens]]
"""Returns a request with the length of its answer, and its hook of tokens."""
FORMS = Registry[Callable[[PromptEncoder, Sequence[int]], Form]]("sinkprune.forms")
"""What makes the `Form` of each `Request.form`, from a bundle's prompts and stop tokens."""


class Pipeline(StaysInProcess, Answering):
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
        self.bundle, self.backend = bundle, backend
        self.limits, self.family = self._model.limits, self._model.family
        self.prompts, self.embedding, self.chain = self._model.prompts, self._model.embedding, self._model.chain
        self._stop = tuple(bundle.manifest.tokens.stop)
        self._forms, self._forming = dict[str, Form](), Lock()

    @classmethod
    @checks_options_and(dict.fromkeys(REQUEST_OPTIONS, "Pipeline.generate"))
    @shows_fields(LoadOptions)
    def load(cls: type[P], bundle: str | os.PathLike[str] | Bundle, *, fit: Fit | None = None, **options: Any) -> P:
        """Load a bundle or a folder of engines, by its path or already read.

        `fit` is how pictures that are not square become square: `crop`, `pad` or `stretch` (default: as the
        checkpoint does). `options` are the fields of `LoadOptions`: `backend`, `threads`, `engines`, `compute`,
        `check_sums`, `sha256`, `engines_sha256`, `signed_by`, `wrap` and `during`.

        Raises `BundleError`, `EnginesError`, `BackendError` and `UsageError` (`OptionError` for an unknown argument),
        and `TypeError` for an argument of a wrong type.
        """
        check_fit(fit)
        began, loading = time.perf_counter(), LoadOptions(**options)
        opened = loading.open(bundle, acts=False)
        with loading.during("loading the engines") as progress:
            pipeline = cls(*opened, loading.wrap, fit, reporting(progress))
        pipeline.load_ms = (time.perf_counter() - began) * 1e3
        return pipeline

    def answer(self, request: Request, observer: Observer = NOBODY, new_rows: Callable[[], Rows] = Rows) -> Stream:
        """Return the stream of a request, with each step reported to `observer`; raises what `stream` does.

        `new_rows` makes the request's hook for rows of earlier requests.
        """
        began, state = time.perf_counter(), StreamState()
        plan = self.bundle.manifest.plan(request.method, request.budget)
        request, tokens = self._formed(request)
        new_budgets = self._budgets_of(request, plan, tokens)
        model = self._model.for_plan(plan)

        def new_hooks() -> Hooks:
            return Hooks(new_budgets(state), new_rows(), tokens, observer)

        return Stream(generate(model, request, new_hooks, state), state, began)

    def encode(self, image: PictureLike) -> EncodedPicture:
        """Return an image as the unpruned LLM receives it, with norms and salience; raises `ImageError`."""
        inputs = self._model.tower_inputs(decoded(image, self.family))
        clock = Stopwatch(self.backend)
        with self.backend.turn:
            return encode(self.chain, None, run_tower(self.chain, inputs, clock), clock)

    def new_request(
        self, image: PictureLike | Sequence[PictureLike], prompt: str | Sequence[Text], **options: Any
    ) -> Request:
        most = self.limits.new_tokens if self.limits else DEFAULT_NEW_TOKENS
        return new_request(image, prompt, **{"max_new_tokens": min(DEFAULT_NEW_TOKENS, most), **options})

    def load_plans(self, method: str, progress: OnProgress = unreported) -> None:
        """Load the pruning graphs of all budgets of a method, so that no request waits for them.

        `progress` is called before and after each budget. Raises `BudgetError` for a method that the bundle does not
        have.
        """
        self._model.load_plans(method, progress)

    def _formed(self, request: Request) -> tuple[Request, Tokens]:
        if request.form is None:
            return request, Tokens(self._stop, request.min_new_tokens)
        with self._forming:
            if request.form not in self._forms:
                self._forms[request.form] = FORMS[request.form](self.prompts, self._stop)
        return self._forms[request.form](request)

    def _budgets_of(self, request: Request, plan: Plan | None, tokens: Tokens) -> Callable[[StreamState], Budgets]:
        if request.deadline_ms is not None:
            raise UsageError(
                "a deadline was given, and this pipeline measures no costs. Load the bundle with sinkprune.Pipeline."
            )
        return lambda state: Budgets(self.bundle.manifest, request, plan, tokens.passes)
