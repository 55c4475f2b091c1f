"""A small pipeline, a server in this process, and OpenAI's client of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import openai
import pytest
from tests.serving.test_server import served

from sinkprune import Pipeline


@pytest.fixture(scope="module")
def pipe(pipeline: Callable[..., Pipeline]) -> Pipeline:
    return pipeline("gqa-112", "fp32", ("retain-64", "retain-192"), max_images=3)


@pytest.fixture(scope="module")
def address(pipe: Pipeline) -> Iterator[str]:
    with served(pipe) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client
