"""Errors of HTTP requests, in the form that OpenAI's clients read."""

from __future__ import annotations

import errno
from typing import Any

RETRY_S = 1
"""When a client that was rejected with 429 should try again."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_NO_FILES = (errno.EMFILE, errno.ENFILE)


class ApiError(Exception):
    """A request that the server rejects, with an HTTP status and one message."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, retry_after: int | None = None
    ) -> None:
        """Reject with `status`. `param` is the field of the body that is wrong; `retry_after` is in seconds."""
        super().__init__(message)
        self.status, self.param, self.retry_after = status, param, retry_after

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the response."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}


def shutting_down() -> ApiError:
    """Return the error of a request that a server did not answer before its end."""
    return ApiError("the server is shutting down. Send the request to another.", status=503)


def wrong(message: str) -> ApiError:
    """Return the error of a request whose field `messages` is wrong."""
    return ApiError(message, "messages")


def shortage(error: BaseException | None) -> ApiError | None:
    """Return the error of a request for which the machine lacks files or room on a disk; None for other errors."""
    while error is not None:
        found = error.errno if isinstance(error, OSError) else None
        if found in _NO_ROOM:
            return ApiError(
                "the server has no room for a temporary file. Send a shorter video, or have the server's temporary "
                "folder (TMPDIR) cleared.",
                status=507,
            )
        if found in _NO_FILES:
            return ApiError("the server has no free file descriptor. Try again later.", status=503, retry_after=1)
        error = error.__cause__
    return None
