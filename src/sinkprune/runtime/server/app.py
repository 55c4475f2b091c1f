"""The HTTP application: routes, limits, and the way of a request through the scheduler and back."""

from __future__ import annotations

import asyncio
import hmac
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from sinkprune.contract.checks.format_value import counted
from sinkprune.contract.errors import SinkpruneError
from sinkprune.runtime.media.picture_warnings import notes_on
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.server.api_error import ApiError
from sinkprune.runtime.server.bodies import Bodies
from sinkprune.runtime.server.body_fields import field_of
from sinkprune.runtime.server.chat_request import ChatReader, ChatRequest, model_names
from sinkprune.runtime.server.metrics import Metrics
from sinkprune.runtime.server.page import page_endpoint
from sinkprune.runtime.server.picture_urls import PictureReader, fetch_https
from sinkprune.runtime.server.responses import Completion, TokenLogprobs, event
from sinkprune.runtime.server.scheduler import RETRY_S, Job, Scheduler
from sinkprune.runtime.session import MAX_BYTES, Session
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.observer import NOBODY
from sinkprune.runtime.steps.request import DEFAULT_METHOD
from sinkprune.runtime.text.tool_answer import ToolAnswerReader

# A picture of the largest size takes up to 1 GB while it is decoded.
_DECODED_AT_ONCE = 2

_Event = tuple[str, list[dict[str, object]] | None] | Answer | BaseException
"""A token's text with the log probabilities since the last, or how the request ended."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What a server answers, and its limits."""

    name: str
    """The model's name."""
    budget: str
    """The budget of requests that name none."""
    method: str = DEFAULT_METHOD
    """The method of requests that name none."""
    api_key: str | None = None
    """The key that requests must have in `Authorization: Bearer`; None for none."""
    allow_remote_images: bool = False
    """Whether the server fetches pictures from https addresses."""
    max_body_bytes: int = 64 << 20
    max_body_seconds: float = 60.0
    """How long a body may take to arrive."""
    max_queue: int = 64
    """The most requests that are being read, and the most that wait or run."""
    max_active: int = 8
    """The most requests that run at once. Each has KV caches."""
    session_bytes: int = MAX_BYTES
    """The memory for what requests about the same pictures share; 0 for none."""


def new_app(pipeline: Pipeline, settings: ServerSettings) -> Starlette:
    """Return the application, whose scheduler starts and ends with it.

    While it runs, any thread may call `app.state.end_requests()`, which ends all requests with status 503 and returns
    after the model's current step.
    """
    server = _Server(pipeline, settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        app.state.end_requests = lambda: server.end_requests(loop)
        try:
            yield
        finally:
            await run_in_threadpool(server.scheduler.close)

    routes = [
        Route("/", page_endpoint()),
        Route("/v1/chat/completions", server.guarded(server.complete), methods=["POST"]),
        Route("/v1/models", server.guarded(server.models)),
        Route("/v1/models/{name:path}", server.guarded(server.one_model)),
        Route("/health", server.health),
        Route("/metrics", server.metrics_page),
    ]
    handlers = {HTTPException: server.http_error, Exception: server.our_error}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)  # type: ignore[arg-type]


class _Server:
    def __init__(self, pipeline: Pipeline, settings: ServerSettings) -> None:
        self._settings, self._pipeline = settings, pipeline
        # TensorRT engines of opset20 take no new rows after earlier ones.
        self._session = Session(pipeline, settings.session_bytes) if pipeline.backend.resumes else None
        answering = self._session or pipeline
        self._reader = ChatReader(
            settings.name,
            model_names(
                settings.name, pipeline.bundle.manifest, settings.method, auto=pipeline.thresholds is not None
            ),
            settings.budget,
            settings.method,
            answering,
            pipeline.plans,
            PictureReader(pipeline.family, fetch_https if settings.allow_remote_images else None),
        )
        self.scheduler = Scheduler(answering, most_jobs=settings.max_queue, most_active=settings.max_active)
        self._bodies = Bodies(settings.max_body_bytes, settings.max_body_seconds)
        self._reading, self._decoding = 0, asyncio.Semaphore(_DECODED_AT_ONCE)
        self._started = int(time.time())
        self._metrics = Metrics(
            waiting=lambda: self.scheduler.waiting,
            active=lambda: self.scheduler.active,
            session_bytes=lambda: self._session.nbytes if self._session else 0,
        )

    def guarded(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return `endpoint` with a check of the API key, and errors as JSON."""

        async def guarded(http: Request) -> Response:
            try:
                key = self._settings.api_key
                if key is not None and not _has_key(http, key):
                    raise ApiError(
                        "the API key is missing or wrong. Send the header Authorization: Bearer KEY.", status=401
                    )
                return await endpoint(http)
            except ApiError as error:
                self._metrics.ended(error.status)
                if error.status != 408:
                    await self._bodies.discard(http)
                return _response(error)
            except ClientDisconnect:
                # Nobody reads the response. nginx gives such requests this status.
                self._metrics.ended(499)
                return Response(status_code=499)

        return guarded

    def end_requests(self, loop: asyncio.AbstractEventLoop) -> None:
        """End all requests of `loop` with status 503; called in another thread."""
        loop.call_soon_threadsafe(self._bodies.end)
        self.scheduler.close()

    async def models(self, http: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._reader.models]})

    async def one_model(self, http: Request) -> Response:
        name = http.path_params["name"]
        self._reader.check_model(name)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "sinkprune"}

    async def health(self, http: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self._settings.name, "backend": self._pipeline.backend.name})

    async def metrics_page(self, http: Request) -> Response:
        return PlainTextResponse(self._metrics.text())

    async def complete(self, http: Request) -> Response:
        arrived = time.perf_counter()
        chat = await self._read(http)
        reader = None if chat.request.tools is None else ToolAnswerReader()
        notes = [*chat.notes, *notes_on(chat.request.pictures)]
        completion = Completion(chat.model, kept_tokens=chat.kept_tokens, notes=notes, reader=reader)
        events: asyncio.Queue[_Event] = asyncio.Queue()
        job = self._job(chat, completion, events, arrived)
        self.scheduler.submit(job)
        if chat.stream:
            # The status is known with the first event only.
            first = await self._next(http, job, events)
            return StreamingResponse(
                self._chunks(http, chat, completion, job, events, first), media_type="text/event-stream"
            )
        logprobs: list[dict[str, object]] = []
        while True:
            found = await self._next(http, job, events)
            if isinstance(found, Answer):
                self._metrics.answered(found, completion.read_ms, completion.queued_ms)
                self._metrics.ended(200)
                return JSONResponse(completion.whole(found, None if chat.logprobs is None else logprobs))
            logprobs += found[1] or []

    async def _read(self, http: Request) -> ChatRequest:
        """Return the request in the body. Few bodies are in memory, and fewer pictures are decoded, at once."""
        if self._reading >= self._settings.max_queue:
            others = counted(self._reading, "other request")
            raise ApiError(f"the server is reading {others}. Try again later.", status=429, retry_after=RETRY_S)
        self._reading += 1
        try:
            body = await self._bodies.read(http)
            async with self._decoding:
                return await run_in_threadpool(self._reader.read, body)
        finally:
            self._reading -= 1

    def _job(self, chat: ChatRequest, completion: Completion, events: asyncio.Queue[_Event], arrived: float) -> Job:
        """Return the job of a request that arrived at that time, and has just been read."""
        loop = asyncio.get_running_loop()
        tokenizer = self._pipeline.prompts.tokenizer
        observer = NOBODY if chat.logprobs is None else TokenLogprobs(tokenizer, chat.logprobs)
        read = time.perf_counter()
        completion.read_ms = (read - arrived) * 1e3

        def put(found: _Event) -> None:
            # The loop may have ended before the scheduler.
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, found)

        def on_text(text: str) -> None:
            tokens = None
            if isinstance(observer, TokenLogprobs):
                tokens, observer.tokens = observer.tokens, []
            put((text, tokens))

        def on_start() -> None:
            completion.queued_ms = (time.perf_counter() - read) * 1e3

        job = Job(chat.request, chat.priority, observer, on_text, put, on_start, fields=chat.fields, arrived=arrived)
        if not chat.session:
            job.answering = self._pipeline
        return job

    async def _next(
        self, http: Request, job: Job, events: asyncio.Queue[_Event]
    ) -> tuple[str, list[dict[str, object]] | None] | Answer:
        """Return a job's next text, or its answer, with its deadline counted from the arrival.

        Cancels the job if the client goes away. Raises `ApiError` for errors of the request, and other errors as they
        are.
        """
        found: _Event | None = None
        try:
            while found is None:
                # Asked for each token: some follow each other too fast for a timeout.
                if await http.is_disconnected():
                    raise ClientDisconnect
                with suppress(asyncio.TimeoutError):
                    found = await asyncio.wait_for(events.get(), 0.25)
        except (ClientDisconnect, asyncio.CancelledError):
            self.scheduler.cancel(job)
            raise
        if isinstance(found, SinkpruneError):
            raise ApiError(str(found), field_of(found, job.fields)) from found
        if isinstance(found, BaseException):
            raise found
        return job.from_arrival(found) if isinstance(found, Answer) else found

    async def _chunks(
        self,
        http: Request,
        chat: ChatRequest,
        completion: Completion,
        job: Job,
        events: asyncio.Queue[_Event],
        found: tuple[str, list[dict[str, object]] | None] | Answer,
    ) -> AsyncIterator[bytes]:
        first = True
        try:
            while not isinstance(found, Answer):
                text, logprobs = found
                for chunk in completion.chunks(text, logprobs, first=first):
                    yield event(chunk)
                first = False
                found = await self._next(http, job, events)
            self._metrics.answered(found, completion.read_ms, completion.queued_ms)
            self._metrics.ended(200)
            yield event(completion.last_chunk(found))
            if chat.include_usage:
                yield event(completion.usage_chunk(found))
            yield event("[DONE]")
        except (ClientDisconnect, asyncio.CancelledError, GeneratorExit) as gone:
            # Starlette cancels a stream whose client has gone away. A whole answer was counted.
            if not isinstance(found, Answer):
                self._metrics.ended(499)
            if not isinstance(gone, ClientDisconnect):
                raise
        except Exception as error:
            # The status was sent already.
            known = error if isinstance(error, ApiError) else _our_fault(error)
            self._metrics.ended(known.status)
            yield event(known.body)
        finally:
            self.scheduler.cancel(job)

    async def http_error(self, http: Request, error: HTTPException) -> Response:
        """Return the response for an unknown path or a wrong method."""
        await self._bodies.discard(http)
        return _response(ApiError(f"{error.detail}: {http.method} {http.url.path}.", status=error.status_code))

    async def our_error(self, http: Request, error: Exception) -> Response:
        """Return the response for a bug of ours."""
        self._metrics.ended(500)
        return _response(_our_fault(error))


def _has_key(http: Request, key: str) -> bool:
    """Return whether a request has the key. The name of the scheme may be in any case (RFC 7235)."""
    scheme, _, given = http.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())


def _our_fault(error: BaseException) -> ApiError:
    traceback.print_exception(error)
    return ApiError(f"the server has a bug: {type(error).__name__}. Its log has the traceback.", status=500)


def _response(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)
