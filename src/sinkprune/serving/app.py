"""The HTTP application: routes, limits, and the way of a request through the scheduler and back."""

from __future__ import annotations

import asyncio
import hmac
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from anyio import from_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from sinkprune.contract.checks import counted, format_value
from sinkprune.contract.errors import SinkpruneError
from sinkprune.runtime.commands.options import Options
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.answer import Answer
from sinkprune.serving.body_fields import ApiError, field_of, shortage, shutting_down
from sinkprune.serving.callers import Callers
from sinkprune.serving.chat_request import ChatReader, ChatRequest
from sinkprune.serving.connections import Bodies, Body, Places
from sinkprune.serving.page import Metrics, page_endpoint
from sinkprune.serving.picture_urls import MOST_REMOTE_BYTES, PictureReader, fetch_https
from sinkprune.serving.responses import Completion, FileNotes, TokenLogprobs, ToolAnswerReader, event
from sinkprune.serving.scheduler import Job, Scheduler
from sinkprune.serving.sessions import Session, why_no_sessions

# Each has a thread and a connection.
_FETCHED_AT_ONCE = 16
# Parsing a body takes up to ten times its size, so that large ones are parsed one at a time.
_SMALL_BODY = 1 << 20
_PARSED_AT_ONCE = 2

_Endpoint = Callable[[Request], Awaitable[Response]]

_Piece = tuple[str, list[dict[str, object]] | None]
"""A token's text with the log probabilities since the last."""
_Event = _Piece | Answer | BaseException


def new_app(pipeline: Pipeline, options: Options) -> Starlette:
    """Return the application, whose scheduler starts and ends with it.

    `options` are those of `add_app_options`, as `read_app_bundle` completes them, and `host`.

    While it runs, any thread may call `app.state.end_requests()`, which ends all requests with status 503 and returns
    after the model's current step.
    """
    server = _Server(pipeline, options)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        app.state.end_requests = lambda: server.end_requests(loop)
        try:
            yield
        finally:
            await run_in_threadpool(server.scheduler.close)

    routes = [
        Route("/", server.guarded(page_endpoint())),
        Route("/v1/chat/completions", server.guarded(server.complete, needs_key=True), methods=["POST"]),
        Route("/v1/models", server.guarded(server.models, needs_key=True)),
        Route("/v1/models/{name:path}", server.guarded(server.one_model, needs_key=True)),
        Route("/health", server.guarded(server.health)),
        Route("/metrics", server.guarded(server.metrics_page)),
    ]
    handlers: Any = {HTTPException: server.http_error, Exception: server.our_error}
    cors = Middleware(
        CORSMiddleware, allow_origins=options.allow_origin, allow_methods=("GET", "POST"), allow_headers=("*",)
    )
    middleware = [cors] if options.allow_origin else []
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=middleware)


class _Server:
    def __init__(self, pipeline: Pipeline, options: Options) -> None:
        self._options, self._pipeline = options, pipeline
        self._session = None if why_no_sessions(pipeline) else Session(pipeline, options.session_bytes)
        answering = self._session or pipeline
        self._reader = ChatReader(
            options.name, options.budget, options.method, pipeline, PictureReader(pipeline.family, None)
        )
        self.scheduler = Scheduler(answering, most_jobs=options.max_queue, most_active=options.max_active)
        self._callers = Callers(options.host, options.allow_host, options.allow_origin)
        self._bodies = Bodies(options.max_body_bytes, options.max_waiting_bytes)
        self._reading = self._fetching = 0
        self._parsing_small, self._parsing_large = Places(_PARSED_AT_ONCE, more=1), Places(1)
        self._started = int(time.time())
        self._metrics = Metrics(
            waiting=lambda: self.scheduler.waiting,
            active=lambda: self.scheduler.active,
            session_bytes=lambda: self._session.nbytes if self._session else 0,
        )

    def guarded(self, endpoint: _Endpoint, *, needs_key: bool = False) -> _Endpoint:
        """Return `endpoint` for callers that may send requests, and with errors as JSON."""
        key = self._options.api_key

        async def guarded(http: Request) -> Response:
            try:
                if key is None:
                    self._callers.check(http.headers)
                elif needs_key and not _has_key(http, key):
                    what = "the API key is missing or wrong. Send the header Authorization: Bearer KEY."
                    raise ApiError(what, status=401)
                return await endpoint(http)
            except (ApiError, OSError) as error:
                rejected = _rejected(error)
                if rejected is None:
                    raise
            except ClientDisconnect:
                # Nobody reads the response. nginx gives such requests this status.
                rejected = Response(status_code=499)
            self._metrics.ended(rejected.status_code)
            if rejected.status_code not in (408, 499):
                await self._bodies.discard(http)
            return rejected

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
        return JSONResponse({"status": "ok", "model": self._options.name, "backend": self._pipeline.backend.name})

    async def metrics_page(self, http: Request) -> Response:
        return PlainTextResponse(self._metrics.text())

    async def complete(self, http: Request) -> Response:
        arrived = time.perf_counter()
        kind = http.headers.get("content-type", "")
        # Pages of other origins may send other types without the browser's asking.
        if kind.partition(";")[0].strip().lower() != "application/json":
            found = f"Content-Type is {format_value(kind)}" if kind else "there is no Content-Type"
            what = f"{found}, expected application/json. Send the header Content-Type: application/json."
            raise ApiError(what, status=415)
        # Before it takes a place: a body that does not arrive keeps no other request out.
        body = await self._bodies.read(http)
        streams = False
        try:
            chat = await self._read(http, body)
            # The request has its own copies, which are no larger.
            body.data.clear()
            reader = None if chat.request.tools is None else ToolAnswerReader()
            completion = Completion(chat.model, kept_tokens=chat.kept_tokens, notes=[*chat.notes], reader=reader)
            events: asyncio.Queue[_Event] = asyncio.Queue()
            job = self._job(chat, completion, events, arrived)
            self.scheduler.submit(job)
            if chat.stream:
                # The status is known with the first event only.
                first = await self._next(http, job, events)
                streams = True
                return _Stream(
                    self._chunks(http, chat, completion, job, events, first), partial(self._end, job, body)
                )
            logprobs: list[dict[str, object]] = []
            while True:
                given = await self._next(http, job, events)
                if isinstance(given, Answer):
                    self._answered(given, completion)
                    return JSONResponse(completion.whole(given, None if chat.logprobs is None else logprobs))
                logprobs += given[1] or []
        finally:
            if not streams:
                self._bodies.release(body)

    def _end(self, job: Job, body: Body) -> None:
        self.scheduler.cancel(job)
        self._bodies.release(body)

    def _answered(self, answer: Answer, completion: Completion) -> None:
        # The time of preparing has a part that the answer's times have too.
        completion.read_ms -= answer.ms["preprocess"] or 0.0
        self._metrics.answered(answer, completion.read_ms, completion.queued_ms)
        self._metrics.ended(200)

    async def _read(self, http: Request, body: Body) -> ChatRequest:
        if self._reading >= self._options.max_queue:
            others = counted(self._reading, "other request")
            raise ApiError(f"the server is reading {others}. Try again later.", status=429)
        reader, data = self._reader, body.data
        parsing = self._parsing_large if len(data) > _SMALL_BODY else self._parsing_small
        priority = body.priority
        if self._options.allow_remote_images:
            pictures = replace(
                reader.pictures, fetch=lambda url: from_thread.run(self._fetch, http, url, body, parsing, priority)
            )
            reader = replace(reader, pictures=pictures)
        self._reading += 1
        try:
            # uvicorn stopped to read the connection of a large body, and would not notice its end.
            await http.is_disconnected()
            await parsing.enter(priority)
            try:
                if await http.is_disconnected():
                    raise ClientDisconnect
                found = await run_in_threadpool(_value_or_error, reader.read, data)
            finally:
                parsing.leave(priority)
        finally:
            self._reading -= 1
        if isinstance(found, ChatRequest):
            return found
        try:
            raise found
        finally:
            # The error's frames have it, in this one too: a cycle that would keep the body.
            del found

    async def _fetch(self, http: Request, url: str, body: Body, parsing: Places, priority: int) -> bytes:
        """Return the bytes at an address; the request leaves its place for parsing to others meanwhile."""
        if self._fetching >= _FETCHED_AT_ONCE:
            others = counted(self._fetching, "other request")
            raise ApiError(f"the server fetches pictures of {others}.", status=429)
        self._bodies.add(body, MOST_REMOTE_BYTES)
        self._fetching += 1
        self._reading -= 1
        parsing.leave(priority)
        fetching = asyncio.ensure_future(fetch_https(url))
        try:
            while not fetching.done():
                if await http.is_disconnected():
                    raise ClientDisconnect
                if self._bodies.ends:
                    raise shutting_down()
                await asyncio.wait([fetching], timeout=0.25)
            data = fetching.result()
            self._bodies.add(body, len(data) - MOST_REMOTE_BYTES)
            return data
        finally:
            fetching.cancel()
            del fetching
            await parsing.enter(priority)
            self._reading += 1
            self._fetching -= 1

    def _job(self, chat: ChatRequest, completion: Completion, events: asyncio.Queue[_Event], arrived: float) -> Job:
        loop = asyncio.get_running_loop()
        tokenizer = self._pipeline.prompts.tokenizer
        notes = completion.notes
        observer = FileNotes(notes) if chat.logprobs is None else TokenLogprobs(notes, tokenizer, chat.logprobs)
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

        def on_start(prepared_ms: float) -> None:
            completion.read_ms += prepared_ms
            completion.queued_ms = (time.perf_counter() - read) * 1e3 - prepared_ms

        job = Job(chat.request, chat.priority, observer, on_text, put, on_start, fields=chat.fields, arrived=arrived)
        if not chat.session:
            job.answering = self._pipeline
        return job

    async def _next(self, http: Request, job: Job, events: asyncio.Queue[_Event]) -> _Piece | Answer:
        """Return a job's next text, or its answer. Cancels the job if the client goes away. Raises its error."""
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
            try:
                raise found
            finally:
                del found
        return found

    async def _chunks(
        self,
        http: Request,
        chat: ChatRequest,
        completion: Completion,
        job: Job,
        events: asyncio.Queue[_Event],
        found: _Piece | Answer,
    ) -> AsyncIterator[bytes]:
        first = True
        try:
            while not isinstance(found, Answer):
                text, logprobs = found
                for chunk in completion.chunks(text, logprobs, first=first):
                    yield event(chunk)
                first = False
                found = await self._next(http, job, events)
            self._answered(found, completion)
            yield event(completion.last_chunk(found))
            if chat.include_usage:
                yield event(completion.usage_chunk(found))
            yield event("[DONE]")
        except (ClientDisconnect, asyncio.CancelledError, GeneratorExit) as gone:
            # A whole answer was counted.
            if not isinstance(found, Answer):
                self._metrics.ended(499)
            if not isinstance(gone, ClientDisconnect):
                raise
        except Exception as error:
            # The status was sent already.
            rejected = _rejected(error) or _response(_our_fault(error))
            self._metrics.ended(rejected.status_code)
            yield event(bytes(rejected.body).decode())

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


def _value_or_error(read: Callable[[bytearray], ChatRequest], body: bytearray) -> ChatRequest | Exception:
    """Return what `read` returns or raises: libraries keep errors that a thread raises, with all their frames."""
    try:
        return read(body)
    except (ApiError, ClientDisconnect) as error:
        return error.with_traceback(None)
    except Exception as error:
        return error


def _rejected(error: Exception) -> Response | None:
    """Return the response for an error of a request, or of a machine that lacks something; None for a bug of ours."""
    known = shortage(error) or error
    return _response(known) if isinstance(known, ApiError) else None


def _our_fault(error: BaseException) -> ApiError:
    # On a full disk the log takes nothing more.
    with suppress(OSError):
        traceback.print_exception(error)
    return ApiError(f"the server has a bug: {type(error).__name__}. Its log has the traceback.", status=500)


class _Stream(StreamingResponse):
    """Server-sent events; `end` is called at their end, also if the client leaves before the first.

    The events end by themselves when the client leaves. Starlette would cancel them, and keep frames in a cycle.
    """

    def __init__(self, chunks: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        super().__init__(chunks, media_type="text/event-stream")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.stream_response(send)
        finally:
            self._end()


def _response(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)
