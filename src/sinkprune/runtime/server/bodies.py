"""The bodies of requests: how long they may be and how late they may arrive, until the server ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from sinkprune.runtime.server.api_error import ApiError, shutting_down

T = TypeVar("T")

_DISCARDING_S = 10.0
"""How long the rest of a rejected body is read."""


class Bodies:
    """Reads bodies. All calls are made in the server's event loop."""

    def __init__(self, max_bytes: int, max_seconds: float) -> None:
        """Allow bodies of `max_bytes` that arrive within `max_seconds`."""
        self._max_bytes, self._max_seconds = max_bytes, max_seconds
        self.ends, self._arriving = False, set[asyncio.Task[Any]]()

    async def read(self, http: Request) -> bytes:
        """Return the body of a request; raises `ClientDisconnect`, and `ApiError` with status 408, 413 or 503."""
        try:
            return await self._until_end(self._whole(http), self._max_seconds)
        except asyncio.TimeoutError as error:
            late = f"the body did not arrive within {self._max_seconds:g} seconds. Send it faster."
            raise ApiError(late, status=408) from error

    async def discard(self, http: Request) -> None:
        """Read the rest of the body of a rejected request, for some seconds.

        If the connection closed while the client still sends, the client would find it reset, and not read the
        response.
        """

        async def read() -> None:
            async for _ in http.stream():
                pass

        # RuntimeError: the body was read to its end before. ApiError: the server ends.
        with suppress(RuntimeError, ClientDisconnect, asyncio.TimeoutError, ApiError):
            await self._until_end(read(), _DISCARDING_S)

    def end(self) -> None:
        """Wait for no body any longer."""
        self.ends = True
        for task in self._arriving:
            task.cancel()

    async def _whole(self, http: Request) -> bytes:
        data = bytearray()
        async for part in http.stream():
            data += part
            if len(data) > self._max_bytes:
                raise ApiError(f"the body has more than {self._max_bytes} bytes. Send smaller pictures.", status=413)
        return bytes(data)

    async def _until_end(self, reading: Coroutine[Any, Any, T], seconds: float) -> T:
        """Return the result of `reading`; raises its errors, `TimeoutError`, and `ApiError` when the server ends."""
        task = asyncio.ensure_future(reading)
        self._arriving.add(task)
        if self.ends:
            task.cancel()
        try:
            return await asyncio.wait_for(task, seconds)
        except asyncio.CancelledError as cancelled:
            if self.ends:
                raise shutting_down() from cancelled
            raise
        finally:
            self._arriving.discard(task)
