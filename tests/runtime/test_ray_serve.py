"""Two replicas of Ray Serve: answers are those of the pipeline, also while a replica is killed and replaced."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import yaml
from PIL import Image
from tests.serving.test_server import asked

from ray_serve import processes, ray_served
from sinkprune import Pipeline
from sinkprune.contract.errors import BudgetError, UsageError
from sinkprune.serving import ray_serve as replicas
from sinkprune.serving.ray_serve import build
from support.programs.printed_commands import ALL, blocks

BUDGET, QUESTION = "retain-64", "What is on the table?"
CLIENTS, REQUESTS, RETRIES = 16, 64, 4
# Of different lengths, so that clients do not pause at the same time.
TOKENS = [100 + 10 * (number % CLIENTS) for number in range(REQUESTS)]
SAME = {"x-session-id": "robot"}
HANDLED = "ray::ServeReplica:sinkprune:sinkprune.handle_request"


@pytest.fixture(scope="module")
def path(bundle: Callable[..., Path]) -> Path:
    return bundle("gqa-112", "fp32", (BUDGET,))


@pytest.fixture(scope="module")
def cluster(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the address of two replicas, and the session of their processes."""
    with ray_served(
        bundle=path, name="m", budget=BUDGET, replicas=2, threads=1, sessions=True, api_key="key"
    ) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: tuple[str, int]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster[0]}/v1", api_key="key", max_retries=RETRIES, timeout=120) as client:
        yield client


def pictures(count: int, seed: int) -> list[Image.Image]:
    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(0, 256, (90, 120, 3), dtype=np.uint8)) for _ in range(count)]


def two_replicas(cluster: tuple[str, int]) -> set[int]:
    """Return the processes of two replicas, as soon as both have answered."""
    address, session = cluster
    found, until = set[int](), time.monotonic() + 180
    while len(found) < 2:
        assert time.monotonic() < until, "fewer than two replicas answer"
        httpx.get(f"{address}/health", timeout=60)
        # Ray titles its processes with what they did last.
        found = (found | {*processes(session, HANDLED)}) & {*processes(session)}
    return found


def cpu_ticks(process: int) -> int:
    """Return the processor time that a process has used."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


def ask(client: openai.OpenAI, picture: Image.Image, tokens: int, headers: dict[str, str]) -> tuple[str | None, int]:
    """Return an answer of so many tokens, and how often the client sent the request again."""
    raw = client.chat.completions.with_raw_response.create(
        model="m",
        messages=asked(picture, QUESTION),
        max_tokens=tokens,
        extra_body={"min_tokens": tokens},
        extra_headers=headers,
    )
    return raw.parse().choices[0].message.content, raw.retries_taken


@pytest.mark.ray
def test_no_request_is_lost_when_a_replica_is_killed(
    cluster: tuple[str, int], client: openai.OpenAI, path: Path
) -> None:
    shown = pictures(REQUESTS, 0)
    used = {process: cpu_ticks(process) for process in two_replicas(cluster)}
    ask(client, shown[0], 900, SAME)
    second, first = sorted(used, key=lambda process: cpu_ticks(process) - used[process])
    # Half of the requests are for the replica that is killed.
    headers = [SAME if number % 2 else {} for number in range(REQUESTS)]
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = [clients.submit(ask, client, *each) for each in zip(shown, TOKENS, headers, strict=True)]
        for number, _ in enumerate(as_completed(answers)):
            if number == REQUESTS // 4:
                os.kill(first, signal.SIGKILL)
    found = [answer.result() for answer in answers]
    assert sum(retries for _, retries in found) > 0, "the replica had no request when it was killed"
    pipe = Pipeline.load(path, threads=1)
    expected = [
        pipe.generate(picture, QUESTION, budget=BUDGET, max_new_tokens=tokens, min_new_tokens=tokens).text
        for picture, tokens in zip(shown, TOKENS, strict=True)
    ]
    assert [text for text, _ in found] == expected
    now = two_replicas(cluster)
    assert second in now and first not in now


@pytest.mark.ray
def test_the_same_session_id_reaches_the_replica_with_the_picture(
    cluster: tuple[str, int], client: openai.OpenAI
) -> None:
    two_replicas(cluster)
    for number, picture in enumerate(pictures(8, 1)):
        header = {"x-session-id": f"robot {number}"}
        reused = [
            client.chat.completions.create(
                model="m", messages=asked(picture, question), max_tokens=1, extra_headers=header
            ).model_extra["sinkprune"]["reused_towers"]  # type: ignore[index]
            for question in (QUESTION, "How many?")
        ]
        assert reused == [0, 1]


@pytest.mark.ray
def test_errors_and_keys_are_those_of_the_server(cluster: tuple[str, int], client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="The server has: m, m:none"):
        client.chat.completions.create(model="other", messages=asked(pictures(1, 2)[0], QUESTION))
    assert httpx.get(f"{cluster[0]}/v1/models").status_code == 401


def test_wrong_arguments_are_refused(path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "required: BUNDLE.* Expected bundle=BUNDLE, replicas"),
        ({"replica": 2}, "unrecognized arguments: --replica=2"),
        ({"replicas": 0}, "replicas"),
        ({"port": 80}, "Host and port are Ray's"),
        ({"sessions": "perhaps"}, "sessions"),
        ({"name": "a:b"}, "without ':'"),
    ]
    for arguments, said in cases:
        with pytest.raises(UsageError, match=said):
            build({"bundle": str(path), **arguments} if arguments else {})


def test_the_arguments_of_the_page_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "usable_cores", lambda: 5)
    [command] = [text for _, text in ALL if text.startswith("serve run sinkprune")]
    _, _, place, *pairs = command.split()
    assert place == f"{build.__module__}:{build.__name__}"
    [config] = [block.text for block in blocks() if (block.page, block.language) == ("ray.md", "yaml")]
    [application] = yaml.safe_load(config)["applications"]
    assert application["import_path"] == place
    for given, bundle in (
        (dict(pair.split("=") for pair in pairs), "demo-output/bundle"),
        (application["args"], "/srv/bundle"),
    ):
        options = replicas._parse(given)
        assert (options.bundle, options.replicas, options.sessions) == (Path(bundle).absolute(), 2, True)
    assert not replicas._parse({"bundle": "b", "sessions": "false"}).sessions


def test_a_wrong_budget_and_a_missing_package_are_refused_before_a_replica_starts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BudgetError, match="retain-63"):
        build({"bundle": str(path), "budget": "retain-63"})
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"'ray', which is not installed.*pip install --editable '\.\[ray\]'"):
        build({"bundle": str(path)})
