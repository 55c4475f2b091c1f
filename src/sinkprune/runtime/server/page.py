"""The page at `/`, for people: one HTML file, which may load and run nothing but itself."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response


def page_endpoint() -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of the page. The page needs no API key, because it has no data of its own."""
    html = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": _policy(html),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        # A browser must not show the page of an earlier version.
        "Cache-Control": "no-cache",
    }

    async def page(http: Request) -> Response:
        return HTMLResponse(html, headers=headers)

    return page


def _policy(html: str) -> str:
    """Return the Content-Security-Policy that allows this page's style and script, and requests to this server.

    A browser then runs no other script. Where it knows trusted types, it also rejects every text as HTML.
    """
    return "; ".join(
        [
            "default-src 'none'",
            f"style-src {_hashes('style', html)}",
            f"script-src {_hashes('script', html)}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )


def _hashes(tag: str, html: str) -> str:
    """Return the sources of the inline elements `tag`, by the digests of their content (CSP level 2)."""
    contents = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
    return " ".join(f"'sha256-{digest}'" for digest in digests)
