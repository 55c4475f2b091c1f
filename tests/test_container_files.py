"""The Dockerfiles, the manifests and `docs/containers.md` agree with each other and with the server.

No test builds an image or asks a cluster.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
import yaml

from sinkprune.serving.command import API_KEY
from sinkprune.serving.page import Metrics
from support.programs.commands import check_options
from support.programs.dockerfiles import (
    DOCKERFILES,
    X86,
    command,
    copied,
    health_check,
    instructions,
    is_ignored,
    values,
)
from support.programs.printed_commands import ALL
from support.programs.repository import ROOT

FOLDER = "docs/containers"
MOUNT, PORT, USER = "/bundle", 8000, "10001"
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
GRACE_S = 10
"""What a server takes after `--drain-s`: the model's current step, and the responses."""


def manifest(name: str) -> dict[str, Any]:
    """Return the one document of a manifest."""
    document = yaml.safe_load((ROOT / FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def check_server(words: list[str]) -> None:
    """Check that a container's command serves the bundle at the place and port of all files."""
    assert words[0] == "sinkprune-serve"
    options = check_options(*words)
    assert (str(options.bundle), options.host, options.port) == (MOUNT, "0.0.0.0", PORT)


@pytest.mark.parametrize("path", DOCKERFILES)
def test_an_image_serves_the_bundle_without_root_and_copies_what_the_package_needs(path: str) -> None:
    check_server(command(path))
    assert values(path, "EXPOSE") == [str(PORT)]
    # Kubernetes accepts a number only. It is the user that the image makes.
    assert values(path, "USER")[-1] == USER
    assert any(f"useradd --uid {USER} " in rest for rest in values(path, "RUN"))
    keywords = [word for word, _ in instructions(path)]
    assert "ENTRYPOINT" not in keywords, "words after the image would be its arguments"
    assert keywords.index("USER") < keywords.index("CMD") == len(keywords) - 1
    files = re.findall(r'^(?:readme = "|license-files = \[")(.*?)"', PROJECT, re.MULTILINE)
    sources = copied(path)
    assert {"pyproject.toml", "src", *files} == {*sources} and len(files) == 2
    packages = [file.relative_to(ROOT).as_posix() for file in (ROOT / "src/sinkprune").rglob("*.py")]
    assert [name for name in (*sources, *packages) if is_ignored(name) or not (ROOT / name).exists()] == []


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (None, 1)])
def test_the_health_check_needs_python_only(status: int | None, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status or 0)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    monkeypatch.setenv("http_proxy", "http://proxy.invalid:1")
    [(program, option, text)] = {tuple(health_check(path)) for path in DOCKERFILES}
    assert (program, option, text.count(str(PORT))) == ("python", "-c", 1)
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        port = server.server_port
        if status is not None:
            Thread(target=server.handle_request, daemon=True).start()
        else:
            server.server_close()
        words = [sys.executable, option, text.replace(str(PORT), str(port))]
        assert subprocess.run(words, capture_output=True).returncode == code
    assert asked == ([] if status is None else ["/health"])


@pytest.mark.parametrize("name", ["kserve", "llm-d-servers"])
def test_a_manifest_s_container_agrees_with_the_image(name: str) -> None:
    whole = manifest(name)["spec"]
    spec = whole["predictor"] if name == "kserve" else whole["template"]["spec"]
    [container] = spec["containers"]
    check_server(container["args"])
    assert "command" not in container
    assert [port["containerPort"] for port in container["ports"]] == [PORT]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": PORT}
    [mount], [volume] = container["volumeMounts"], spec["volumes"]
    assert (mount["mountPath"], mount["readOnly"], mount["name"]) == (MOUNT, True, volume["name"])
    assert [entry["name"] for entry in container["env"]] == [API_KEY]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    # It has time to end, and no rights.
    drain_s = check_options(*container["args"]).drain_s
    needed = container["lifecycle"]["preStop"]["sleep"]["seconds"] + drain_s + GRACE_S
    assert 0 < needed <= spec["terminationGracePeriodSeconds"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_picker_reads_metrics_that_the_server_has() -> None:
    server = Metrics(waiting=lambda: 1.0, active=lambda: 2.0, session_bytes=lambda: 0.0)
    lines = dict(line.split() for line in server.text().decode().splitlines() if line[0] != "#")
    # The configuration of the endpoint picker that the chart's values choose.
    epp = manifest("llm-d-router")["router"]["epp"]
    picker = yaml.safe_load(epp["pluginsCustomConfig"][epp["pluginsConfigFile"]])
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in picker["plugins"]}
    [engine] = plugins["core-metrics-extractor"]["engineConfigs"]
    assert lines[engine["queuedRequestsSpec"]] == "1.0" and lines[engine["runningRequestsSpec"]] == "2.0"
    assert plugins["metrics-data-source"]["path"] == "/metrics"
    # A KV cache's use and adapters would be vLLM's.
    assert {*engine} == {"name", "queuedRequestsSpec", "runningRequestsSpec"}


DOCKER_RUNS = [shlex.split(text) for _, text in ALL if text.startswith("docker run ")]


@pytest.mark.parametrize("words", DOCKER_RUNS, ids=" ".join)
def test_a_printed_container_runs_a_known_command_on_its_mount(words: list[str]) -> None:
    image = next(index for index, word in enumerate(words) if re.fullmatch(r"sinkprune(:\w+)?", word))
    options, given = words[:image], words[image + 1 :]
    if given and given[0] != "sinkprune-serve":
        check_options(*given)
        return
    check_server(given or command(X86))
    published = options[options.index("-p") + 1]
    assert published.split(":")[-1] == str(PORT)
    # Open to other machines only with a key.
    assert published.startswith("127.0.0.1:") or options[options.index("-e") + 1] == API_KEY
    assert options[options.index("-v") + 1].endswith(f":{MOUNT}:ro")
