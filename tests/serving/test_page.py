"""The page at `/`: its headers, and that it loads nothing from elsewhere. test_page_in_browser.py uses it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator

import httpx
import pytest
from tests.serving.test_server import served

from sinkprune import Pipeline


@pytest.fixture(scope="module")
def address(pipeline: Callable[..., Pipeline]) -> Iterator[str]:
    with served(pipeline("gqa-112", "fp32", ("retain-64", "retain-192"), max_images=3), api_key="secret") as address:
        yield address


@pytest.fixture(scope="module")
def page(address: str) -> httpx.Response:
    return httpx.get(f"{address}/")


def test_the_page_needs_no_key(address: str, page: httpx.Response) -> None:
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["x-content-type-options"] == "nosniff"
    assert httpx.get(f"{address}/v1/models").status_code == 401
    assert 'id="key" type="password"' in page.text


def test_the_policy_allows_only_the_page_itself(page: httpx.Response) -> None:
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    found = {tag: re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page.text, re.DOTALL) for tag in ("style", "script")}
    for tag, contents in found.items():
        (content,) = contents
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert policy == {
        **dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'"),
        "img-src": "data:",
        "connect-src": "'self'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }


def test_the_file_loads_nothing_and_inserts_no_html(page: httpx.Response) -> None:
    assert re.findall(r"https?:|[\"'(]//|@import|url\(", page.text) == []
    assert re.findall(r"\b(?:src|href)\s*=\s*(\S+?)[\s>]", page.text) == ['"data:,"']
    assert re.findall(r"\bon\w+\s*=\s*[\"']|\bstyle\s*=", page.text) == []
    assert re.findall(r"(?:inner|outer)HTML|insertAdjacent|document\.write|\beval\b|Function\(", page.text) == []
