"""The bodies of requests: how long they may be, how late they may arrive, how many bytes of all are held, and how
many are parsed at once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from anyio import CancelScope, move_on_after
from starlette.requests import ClientDisconnect, Request

from sinkprune.serving.body_fields import ApiError, shutting_down

_ARRIVING_S = 60.0
"""How long a body may take to arrive."""
_DISCARDING_S = 10.0
"""How long the rest of a rejected body is read."""
_PRIORITY = re.compile(rb'"priority"\s*:\s*(-?[0-9]{1,3})(?![0-9])')


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
