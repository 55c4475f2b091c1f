"""Which web pages may send requests to a server without a key."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sinkprune.contract.checks import format_value
from sinkprune.contract.errors import UsageError
from sinkprune.serving.body_fields import ApiError

if TYPE_CHECKING:
    from starlette.datastructures import Headers

_LOCAL = "localhost"
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@\[\]]+)(?::[0-9]*)?", re.IGNORECASE)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@*,]+", re.IGNORECASE)


def host_name(word: str) -> str:
    """Return the name in `--allow-host`, in lower case; raises `UsageError` for anything else, as an address."""
    found = _HOST.fullmatch(word)
    if not found or found[1] != word or word.startswith("[") or "*" in word:
        raise UsageError(f"--allow-host is {format_value(word)}, expected a name as robot.example, without a port.")
    return _normal(word)


def origin(word: str) -> str:
    """Return the origin in `--allow-origin`, in lower case; raises `UsageError` for anything else."""
    if not _ORIGIN.fullmatch(word):
        raise UsageError(
            f"--allow-origin is {format_value(word)}, expected the scheme, name and port of a page, as "
            "https://robot.example or http://localhost:3000."
        )
    return word.lower()


class Callers:
    """Checks the headers of requests that need no key.

    A web page can have its visitor's browser send requests to this machine. The header Origin names the page. A page
    whose name leads to this machine (DNS rebinding) has no foreign origin; the header Host has its name.
    """

    def __init__(self, host: str, names: Iterable[str], origins: Iterable[str]) -> None:
        """Allow further `names` in Host, and the pages of `origins`; the server listens at `host`.

        Beyond loopback, every address is allowed, because no page can have one of this machine's own, and the names
        of this machine.
        """
        self._names, self._origins = {_LOCAL, _normal(host), *map(_normal, names)}, frozenset(origins)
        self._everywhere = not _is_loopback(host)
        if self._everywhere:
            own = _normal(socket.gethostname())
            self._names |= {own, f"{own.partition('.')[0]}.local"}

    def check(self, headers: Headers) -> None:
        """Raise `ApiError` with status 403 for a request that a foreign page may have sent."""
        host = headers.get("host")
        # Browsers always send it.
        if host is not None and not self._is_own(host):
            raise ApiError(
                f"the header Host is {format_value(host)}, no name of this server. Start it with --allow-host NAME, "
                "or with --api-key.",
                status=403,
            )
        page = headers.get("origin")
        if page is not None and page not in self._origins and page.partition("://")[2] != host:
            raise ApiError(
                f"the request is of a page of {format_value(page)}, which is foreign. Start the server with "
                "--allow-origin ORIGIN, or with --api-key.",
                status=403,
            )

    def _is_own(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = _normal(found[1].strip("[]"))
        return name in self._names or _is_loopback(name) or (self._everywhere and _address(name) is not None)


def _normal(name: str) -> str:
    return name.lower().removesuffix(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_loopback(name: str) -> bool:
    address = _address(name)
    return name == _LOCAL if address is None else address.is_loopback
