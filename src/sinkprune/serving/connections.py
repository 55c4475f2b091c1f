"""What clients may hold of the server: connections, by number and time; and bodies of requests.

Bodies have limits on their size, their time, the bytes of all together, and how many are parsed at once.

uvicorn has no limit on the time of a request's head, nor on accepted connections: its `limit_concurrency` rejects
requests whose head arrived. So its protocol class gets both here.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from threading import Timer
from types import FrameType
from typing import Any

import h11
import uvicorn
from anyio import CancelScope, move_on_after
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from sinkprune.contract.errors import UsageError
from sinkprune.serving.body_fields import ApiError, shutting_down

_HEAD_S = 10.0
"""How long a connection waits for the whole head of a request: from the start, or from the last response."""
_TAKING_S = 60.0
"""How long a client may leave a part of a response that the system does not buffer."""
_ARRIVING_S = 60.0
"""How long a body may take to arrive."""
_DISCARDING_S = 10.0
"""How long the rest of a rejected body is read."""
_PRIORITY = re.compile(rb'"priority"\s*:\s*(-?[0-9]{1,3})(?![0-9])')
_MOST_HEADER_BYTES = 1 << 16
_FREE_CHUNKS, _CHUNK_BYTES = 1000, 256
"""How many chunks a body may have anyway, and the bytes that each of its other chunks has on average."""
_MOST, _LEAST = 1000, 8
_ACCEPTED_AT_ONCE = 4
# asyncio accepts more while it starts and ends connections.
_RESERVED = 4 * _ACCEPTED_AT_ONCE + 24
"""Files that are open besides connections: those that are being accepted, temporary files, fetched pictures."""
_BACKLOG = 512
_GRACE_S = 5
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LOG_EVERY_S = 60.0


def most_connections(max_queue: int) -> int:
    """Return how many connections the server may have; raises `UsageError` if the limit of open files is too low.

    With the usual limit of open files there are many more than requests in `max_queue`.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    wanted = max(_MOST, 2 * max_queue)
    used = len(os.listdir("/dev/fd")) + _RESERVED  # noqa: PTH208 -- names only
    found = wanted if limit == resource.RLIM_INFINITY else min(wanted, limit - used)
    if found < _LEAST:
        raise UsageError(
            f"{limit} files may be open, expected at least {used + _LEAST}. Raise the limit: ulimit -n 1024."
        )
    return found


class Connections:
    """The connections that wait for their clients. If there are too many, the first of them are closed."""

    def __init__(self, most: int) -> None:
        self.most = most
        # In the order in which they began to wait: for a request, and amid a body or a response.
        self.idle: dict[_Protocol, None] = {}
        self.begun: dict[_Protocol, None] = {}
        self._logged = -_LOG_EVERY_S

    def close_one(self) -> bool:
        """Close the connection that has waited longest, of the kind with more of them; False if none waits.

        So many half bodies keep no request out, and many idle connections end no body.
        """
        first = next(iter(self.idle if len(self.idle) >= len(self.begun) else self.begun), None)
        if first is None:
            return False
        first.abort()
        return True

    def on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error of asyncio. If no file can be opened, it logs a traceback for each try to accept."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _NO_FILES:
            loop.default_exception_handler(context)
            return
        self.close_one()
        if time.monotonic() - self._logged > _LOG_EVERY_S:
            self._logged = time.monotonic()
            with suppress(OSError):
                sys.stderr.write(f"No connection can be accepted: {error.strerror}. The server tries again.\n")


class Parser(h11.Connection):
    """Rejects bodies of small chunks: of a byte each, 256 KiB that arrive at once are parsed for a second."""

    _left = 0

    def next_event(self) -> Any:
        """Return the next event, as `h11.Connection` does; raises `h11.RemoteProtocolError`."""
        event = super().next_event()
        if isinstance(event, (h11.Request, h11.Response)):
            self._left = _FREE_CHUNKS * _CHUNK_BYTES
        elif isinstance(event, h11.Data):
            self._left += len(event.data) - _CHUNK_BYTES * event.chunk_start
            if self._left < 0:
                raise h11.RemoteProtocolError("too many small chunks")
        return event


class _Protocol(H11Protocol):
    def __init__(self, *arguments: Any, limits: Connections, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = Parser(h11.SERVER, _MOST_HEADER_BYTES)
        self._limits = limits
        self._state: object = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # Otherwise up to 64 KiB are buffered, and nothing reports when they are sent.
        transport.set_write_buffer_limits(high=0)
        super().connection_made(transport)
        if len(self.connections) > self._limits.most and not self._limits.close_one():
            full = f"the server answers requests of {self._limits.most} connections. Try again later."
            transport.write(_response(ApiError(full, status=503)))
            # asyncio adds the connection to its selector only now.
            self.loop.call_soon(self.abort)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def handle_events(self) -> None:
        super().handle_events()
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look()

    def abort(self) -> None:
        """Close the connection at once."""
        self._forget()
        self.transport.abort()

    def _look(self) -> None:
        """Start a new time when the connection begins to wait for something else of its client.

        Data that arrives meanwhile does not extend the time.
        """
        answered = self.cycle is None or self.cycle.response_complete
        seconds: float | None
        if self.flow.write_paused:
            waiting, seconds = self._limits.begun, _TAKING_S
        elif answered:
            waiting, seconds = self._limits.idle, _HEAD_S
        elif self.conn.their_state is h11.SEND_BODY:
            # The application has a time for bodies, and answers with status 408.
            waiting, seconds = self._limits.begun, None
        else:
            self._forget()
            return
        state = (seconds, answered, self.cycle)
        if state != self._state:
            self._forget()
            self._state = state
            waiting[self] = None
            if seconds is not None:
                self._timer = self.loop.call_later(seconds, self._end)

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._state = None
        for waiting in (self._limits.idle, self._limits.begun):
            waiting.pop(self, None)

    def _end(self) -> None:
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            late = f"the header did not arrive within {_HEAD_S:g} seconds. Send it faster."
            self.transport.write(_response(ApiError(late, status=408)))
        self.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed. Where a response has begun, uvicorn's own method raises an error."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            found = "the request is no HTTP/1.1, has more than 64 KiB of headers, or a body with more than "
            small = f"{_FREE_CHUNKS} chunks of less than {_CHUNK_BYTES} bytes. Check the client, and the address."
            self.transport.write(_response(ApiError(found + small)))
        self.abort()


@dataclass(eq=False)
class Body:
    """The bytes that one request holds: of its body, and of pictures that were fetched for it."""

    data: bytearray = field(default_factory=bytearray)
    size: int = 0
    arriving: CancelScope | None = None
    """Ends the reading; None once the body arrived whole."""

    @property
    def priority(self) -> int:
        """The priority that the request seems to have, before it is parsed: when that is done depends on it."""
        found = _PRIORITY.match(self.data, max(0, self.data.rfind(b'"priority"')))
        return int(found[1]) if found else 0


class Bodies:
    """Reads and counts bodies. All calls are made in the server's event loop."""

    def __init__(self, max_bytes: int, most_held: int) -> None:
        """Allow bodies of `max_bytes`, and `most_held` bytes of all together."""
        self._max_bytes, self._most_held = max_bytes, most_held
        self._held = 0
        self._bodies = set[Body]()
        self.ends, self._scopes = False, set[CancelScope]()

    async def read(self, http: Request) -> Body:
        """Return the body of a request; raises `ClientDisconnect`, and `ApiError` with status 408, 413, 429 or 503.

        The caller releases it.
        """
        body = Body()
        self._bodies.add(body)
        http.state.reads_body = True
        try:
            with self._limited(_ARRIVING_S) as scope:
                body.arriving = scope
                async for part in http.stream():
                    if body.size + len(part) > self._max_bytes:
                        most = f"the body has more than {self._max_bytes} bytes"
                        raise ApiError(f"{most}. Send smaller pictures.", status=413)
                    self.add(body, len(part))
                    body.data += part
            body.arriving = None
            if not scope.cancelled_caught:
                return body
            if self.ends:
                raise shutting_down()
            if body not in self._bodies:
                raise self._no_room()
            raise ApiError(f"the body did not arrive within {_ARRIVING_S:g} seconds. Send it faster.", status=408)
        except BaseException:
            self.release(body)
            raise

    async def discard(self, http: Request) -> None:
        """Read the rest of the body of a rejected request, for some seconds.

        If the connection closed while the client still sends, the client would find it reset, and not read the
        response.
        """
        if http.headers.get("expect", "").lower() == "100-continue" and not hasattr(http.state, "reads_body"):
            # The client waits for the status before it sends the body.
            return
        # RuntimeError: the body was read to its end before.
        with self._limited(_DISCARDING_S), suppress(RuntimeError, ClientDisconnect):
            async for _ in http.stream():
                pass

    def end(self) -> None:
        """Wait for no body any longer."""
        self.ends = True
        for scope in self._scopes:
            scope.cancel()

    def add(self, body: Body, size: int) -> None:
        """Count bytes of `body` before they are held; raises `ApiError` with status 429 if there is no room.

        Bodies that are still arriving make room for it, the largest first: who sends slowly keeps nobody out.
        """
        while self._held + size > self._most_held:
            arriving = [one for one in self._bodies if one.arriving is not None]
            largest = max([body, *arriving], key=lambda one: one.size)
            if largest is body or largest.arriving is None:
                raise self._no_room()
            largest.arriving.cancel()
            self.release(largest)
        body.size += size
        self._held += size

    def release(self, body: Body) -> None:
        """Count the bytes of `body` no longer, and hold none."""
        self._held -= body.size
        body.data = bytearray()
        body.size, body.arriving = 0, None
        self._bodies.discard(body)

    @contextmanager
    def _limited(self, seconds: float) -> Iterator[CancelScope]:
        """Leave the block after so many seconds, or when the server ends."""
        with move_on_after(seconds) as scope:
            self._scopes.add(scope)
            if self.ends:
                scope.cancel()
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    def _no_room(self) -> ApiError:
        held = f"the server holds bodies of up to {self._most_held} bytes in all"
        return ApiError(f"{held}. Try again later, or send smaller pictures.", status=429)


class Places:
    """Places for what a few requests do at a time: those of the largest priority first, each in order of arrival.

    All calls are made in one event loop.
    """

    def __init__(self, most: int, more: int = 0) -> None:
        """Let `most` in at once, and so many more of a higher priority than all inside."""
        self._most, self._more, self._inside, self._numbers = most, more, list[int](), count()
        self._waiting = list[tuple[int, int, asyncio.Future[None]]]()

    async def enter(self, priority: int) -> None:
        """Wait for a place, which the caller leaves with the same `priority`."""
        turn = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (-priority, next(self._numbers), turn))
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.leave(priority)
            raise

    def leave(self, priority: int) -> None:
        """Give a place of this priority to the next."""
        self._inside.remove(priority)
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            first, _, turn = self._waiting[0]
            most = self._most + self._more * all(one < -first for one in self._inside)
            if not turn.cancelled() and len(self._inside) >= most:
                return
            heappop(self._waiting)
            if not turn.cancelled():
                self._inside.append(-first)
                turn.set_result(None)


class Server(uvicorn.Server):
    """Answers until SIGINT, SIGTERM or SIGHUP. Requests then have some seconds to end, or get status 503."""

    def __init__(self, app: Starlette, *, drain_s: float = 0, max_queue: int = 64) -> None:
        """Serve `app`, and allow `drain_s` seconds at the end; raises `UsageError` as `most_connections`."""
        self.most = most_connections(max_queue)
        """The most connections."""
        self._app, self._drain_s, self._limits = app, drain_s, Connections(self.most)

        def protocol(*arguments: Any, **options: Any) -> _Protocol:
            return _Protocol(*arguments, limits=self._limits, **options)

        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,  # type: ignore[arg-type]
                # The class for websockets would take connections over, without limits.
                ws="none",
                # A warning for each malformed request would let strangers fill the log.
                log_level="error",
                # The responses of requests that were ended take some time too.
                timeout_graceful_shutdown=int(drain_s) + _GRACE_S,
                server_header=False,
                backlog=_ACCEPTED_AT_ONCE,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End; a second signal changes nothing, because uvicorn would drop requests and print a traceback."""
        if not self.should_exit:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn, with a longer queue of connections in the system than asyncio accepts at once."""
        asyncio.get_running_loop().set_exception_handler(self._limits.on_error)
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(_BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as uvicorn, and end requests after the time to drain."""
        # In a thread, because it waits for the model's current step.
        ending = Timer(self._drain_s, self._app.state.end_requests)
        ending.start()
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


def _response(error: ApiError) -> bytes:
    body = json.dumps(error.body).encode()
    phrase = {400: "Bad Request", 408: "Request Timeout", 503: "Service Unavailable"}[error.status]
    head = f"HTTP/1.1 {error.status} {phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body
