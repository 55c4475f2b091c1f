"""The policy class in LeRobot itself: its control loop, its policy server and its robot client. And policies that
LeRobot itself writes and runs.

LeRobot has an environment of its own, whose Python is `$LEROBOT_PYTHON` (`make test-lerobot`). Its processes run the
commands of the page. This process computes what they should do.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sinkprune import Policy
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.command import main as export
from sinkprune.export.source import ExportRequest
from support.lerobot.episodes import EPISODE, RUN, SEED, episode
from support.models.lerobot_checkpoints import use_small_sizes
from support.programs.printed_commands import ALL
from support.programs.repository import ROOT

pytestmark = pytest.mark.lerobot
SECONDS = 1200
TASK = "pick up the cup"
PLAIN = "python -m sinkprune.policies.lerobot."
[EXPORT] = [text for place, text in ALL if place.startswith("lerobot.md:") and text.startswith("sinkprune-export ")]
[WRITE] = [text for _, text in ALL if text.startswith(f"{PLAIN}write_policy ")]
[SERVE] = [text for _, text in ALL if text.startswith(f"{PLAIN}policy_server ")]


def program(*words: str) -> list[str]:
    """Return the command that runs a module in LeRobot's environment."""
    return [os.environ["LEROBOT_PYTHON"], "-m", "support.lerobot.torchvision_operators", *words]


def printed(text: str, *more: str) -> list[str]:
    """Return the command of the page, with more options."""
    python, option, *words = shlex.split(text)
    assert (python, option) == ("python", "-m")
    return program(*words, *more)


def environment(folder: Path) -> dict[str, str]:
    """Return variables without which LeRobot writes into the user's folders and looks for its hub."""
    own = {"PYTHONPATH": f"{ROOT}/src:{ROOT}/tests", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    return {**os.environ, **own}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the commands of the page have written the bundle and the policy."""
    folder = tmp_path_factory.mktemp("robot")
    _, source, option, bundle, *others = shlex.split(EXPORT)
    assert export([str(ROOT / source), option, str(folder / bundle), *others]) == 0
    options = (f"--policy.seed={SEED}", f"--policy.n_action_steps={RUN}", "--policy.threads=1")
    found = run(printed(WRITE, *options), folder)
    assert "robot-policy: a policy of type 'sinkprune' for LeRobot" in found
    return folder


def run(command: list[str], folder: Path) -> str:
    """Return what a command prints."""
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def server(folder: Path) -> Iterator[str]:
    """The address of LeRobot's policy server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not where the bundle's path in the page's command leads to it.
    place = folder / "server"
    place.mkdir()
    log = place / "log"
    with (
        log.open("w") as output,
        subprocess.Popen(
            printed(SERVE, f"--port={port}"), cwd=place, env=environment(folder), stdout=output, stderr=output
        ) as process,
    ):
        try:
            until = time.monotonic() + SECONDS
            while not listens(port):
                assert process.poll() is None and time.monotonic() < until, log.read_text()
                time.sleep(0.2)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def listens(port: int) -> bool:
    """Return whether a server accepts connections."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_the_control_loop_runs_the_engines(folder: Path) -> None:
    both = json.loads(run(program("support.lerobot.control_loop", "robot-policy", EPISODE, "batches.npz"), folder))
    expected = episode(Policy.load(folder / "robot-bundle", threads=1))
    assert len(both) == 2
    for found in both:
        compare(found, *expected)
    with np.load(folder / "batches.npz") as now, np.load(Path(__file__).parent / "batches.npz") as recorded:
        assert set(now) == set(recorded)
        for name in now:
            if now[name].dtype == np.float32:
                # The robot moves by the actions, whose last bits differ between processors.
                assert np.abs(now[name] - recorded[name]).mean() <= 1e-4, name
            else:
                np.testing.assert_array_equal(now[name], recorded[name], err_msg=name)


def test_the_policy_server_runs_the_engines_for_the_robot_client(folder: Path, server: str) -> None:
    words = ("support.lerobot.table_robot", server, str(folder / "robot-policy"), EPISODE, str(RUN))
    found = json.loads(run(program(*words), folder))
    compare(found, *episode(Policy.load(folder / "robot-bundle", threads=1)))


def test_saved_policies_equal_those_of_lerobot(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Through LeRobot's own pipelines, with its own weights: all ways to normalise, joints that never move, renamed
    and missing cameras, frames of other sizes, and statistics of other shapes or under other names.
    """
    run(program("support.lerobot.saved_policies", *map(str, map(checkpoint, ("pi0", "pi0.5"))), "."), tmp_path)
    files, wrong = sorted(tmp_path.glob("*/*.npz")), {}
    for file in files:
        kind, name = file.parent.name, file.stem
        small = checkpoint({"pi0": "pi0", "pi05": "pi0.5"}[kind])
        use_small_sizes(monkeypatch, small, kind)
        request = ExportRequest(str(file.with_suffix("")), tokenizer=str(small), budgets=("prune-88.9",))
        export_bundle(request, tmp_path / "bundle", force=True)
        policy = Policy.load(tmp_path / "bundle", threads=1)
        with np.load(file) as given:
            frames = [given.get(camera) for camera in policy.facts.cameras or ()]
            report = policy.act(frames, TASK, given["observation.state"], noise=given["noise"], steps=10)
            difference = np.abs(report.actions - given["actions"]).max()
        if difference > 1e-5 or report.in_robots_units == (name in ("no-statistics", "of-a-data-set")):
            wrong[f"{kind}/{name}"] = difference, report.in_robots_units
    assert len(files) >= 16 and wrong == {}


def compare(found: dict[str, Any], actions: list[list[float]], succeeded: bool) -> None:
    """Compare an episode in LeRobot's environment with one here; ONNX Runtime may have another version there."""
    assert found["succeeded"] and succeeded
    np.testing.assert_allclose(found["actions"], actions, rtol=0, atol=1e-4)
