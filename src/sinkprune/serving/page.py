"""The page that shows what the server does, and its metrics."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from importlib.resources import files

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from sinkprune.runtime.steps.answer import Answer

_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
"""The upper ends of the histograms' buckets, in seconds."""
_GAUGES = {
    "waiting": "Counts requests that have not started.",
    "active": "Counts requests that have started and not ended.",
    "session_bytes": "Counts bytes that the session keeps for later requests.",
}
_COUNTERS = {
    "prompt_tokens": "Counts text and visual tokens that the LLM received.",
    "visual_tokens": "Counts visual tokens before pruning.",
    "generated_tokens": "Counts tokens of answers.",
    "reused_rows": "Counts prompt rows that came from earlier requests.",
    "missed_deadlines": "Counts answers that were complete after their deadline.",
}
_TIMES = {
    "read": "Measures the time until a request has arrived and its pictures are decoded.",
    "queued": "Measures the time between reading a request and its start.",
    "ttft": "Measures the time from the start of a request to its first token.",
    "latency": "Measures the time of a whole answer, without the turns of other requests.",
}


class Metrics:
    """Counts requests and tokens, and times of answers. Any thread may call the methods."""

    def __init__(self, **gauges: Callable[[], float]) -> None:
        """Start at zero. `gauges` return values of the moment, by their names in `_GAUGES`."""
        self._registry = own = CollectorRegistry()
        said = "Counts requests that have ended, by HTTP status."
        self._requests = Counter("sinkprune_requests", said, ["status"], registry=own)
        self._counters = {name: Counter(f"sinkprune_{name}", said, registry=own) for name, said in _COUNTERS.items()}
        self._times = {
            name: Histogram(f"sinkprune_{name}_seconds", said, buckets=_BUCKETS, registry=own)
            for name, said in _TIMES.items()
        }
        for name, value in gauges.items():
            Gauge(f"sinkprune_{name}", _GAUGES[name], registry=own).set_function(value)

    def ended(self, status: int) -> None:
        """Count a request that ended with this HTTP status."""
        self._requests.labels(str(status)).inc()

    def answered(self, answer: Answer, read_ms: float, queued_ms: float) -> None:
        """Count an answer to a request that was read and then queued for so many milliseconds."""
        counts = {
            "prompt_tokens": answer.prompt_tokens + answer.tokens_per_layer[0],
            "visual_tokens": answer.visual_tokens,
            "generated_tokens": len(answer.token_ids),
            "reused_rows": answer.reused_rows,
            "missed_deadlines": answer.deadline is not None and not answer.deadline.met,
        }
        for name, count in counts.items():
            self._counters[name].inc(count)
        times = {"read": read_ms, "queued": queued_ms, "ttft": answer.ms["ttft"], "latency": answer.ms["latency"]}
        for name, ms in times.items():
            self._times[name].observe((ms or 0.0) / 1e3)

    def text(self) -> bytes:
        """Return the page of metrics."""
        return generate_latest(self._registry)


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
    """Return the Content-Security-Policy that allows this page's style and script, and requests to this server."""
    # Where a browser knows trusted types, it also rejects every text as HTML.
    own = "".join(f"{tag}-src {_hashes(tag, html)}; " for tag in ("style", "script"))
    return (
        f"default-src 'none'; {own}img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hashes(tag: str, html: str) -> str:
    """Return the sources of the inline elements `tag`, by the digests of their content (CSP level 2)."""
    contents = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
    return " ".join(f"'sha256-{digest}'" for digest in digests)
