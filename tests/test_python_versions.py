"""On this Python, with the newest libraries that pip finds for it and without PyTorch, the pages' commands run.

`make test-python PYTHON=python3.13` makes the environment. Python 3.10 runs bundles only: `SINKPRUNE_EXPORT` names
another Python's sinkprune-export.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from base64 import b64encode
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from PIL import Image

from conftest import make_once
from sinkprune.demo.example_files import write_example_files
from support.programs.commands import BIN, own_process, run, succeed
from support.programs.printed_commands import ALL
from support.programs.repository import ROOT

pytestmark = pytest.mark.python
EXPORTS = {
    "llava-7b": ["pocket", "--max-images", "2"],
    "qwen-7b": ["pocket-qwen3", "--max-frames", "8"],
    "robot": ["pocket-robot", "--max-images", "2"],
}
"""By the name of a bundle on the pages: the pocket model in its place, and options of its export."""
RUN = re.compile(rf"sinkprune-(run|act|replay) ({'|'.join(EXPORTS)}) (?!.*--deadline-ms)")
COMMANDS = list(dict.fromkeys(text for _, text in ALL if RUN.match(text)))


@pytest.fixture(scope="module")
def folder(shared_folder: Path) -> Path:
    """The reader's folder."""
    return make_once(shared_folder / "reader", write_folder)


def write_folder(folder: Path) -> None:
    """Write the files of the demo, scenes, a bag, and exports by this Python's own command where it exports."""
    folder.mkdir()
    write_example_files(folder)
    scenes = [sys.executable, "-m", "sinkprune.demo.write_scenes", folder, "7"]
    subprocess.run(scenes, check=True, capture_output=True)
    write_bag(folder / "drive.mcap")
    exports = sys.version_info >= (3, 11)
    command = [BIN / "sinkprune-export"] if exports else [os.environ["SINKPRUNE_EXPORT"], "--dialect", "opset20"]
    for name, (model, *options) in EXPORTS.items():
        words = [*command, ROOT / "demo" / model, "-o", folder / name, *options]
        subprocess.run(words, check=True, capture_output=True)


def write_bag(path: Path) -> None:
    """Write raw and compressed frames, as a ROS 2 node records them."""
    from support.models import bags

    pictures = [Image.new("RGB", (64, 48), (60 * number, 90, 30)) for number in range(12)]
    said = [
        message
        for raw in bags.frames(pictures)
        for message in (raw, bags.Said(f"{raw.topic}/compressed", raw.time_ns, bags.compressed_image(pictures[0])))
    ]
    next(bags.write_bag(path.with_suffix(""), said).glob("*.mcap")).rename(path)


def test_pytorch_is_not_installed() -> None:
    assert find_spec("torch") is None
    assert len(COMMANDS) > 8


@pytest.mark.parametrize("text", COMMANDS, ids=lambda text: text[:60])
def test_a_printed_command_runs(text: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    command, *words = shlex.split(text)
    outcome = succeed(command, *words, *(["--max-new-tokens", 4] if command != "sinkprune-act" else []))
    assert outcome.stdout.strip()
    for option in ("-o", "--overlay"):
        assert option not in words or (tmp_path / words[words.index(option) + 1]).stat().st_size


def test_the_pocket_model_counts_as_the_readme_says(folder: Path) -> None:
    for budget in ("none", "retain-64"):
        question = ["--image", folder / "scene-6.png", "--prompt", "How many yellow objects are there?"]
        outcome = run("sinkprune-run", folder / "llava-7b", *question, "--budget", budget)
        assert outcome.stdout.split()[0] == "4", outcome.stderr


def test_the_server_answers_about_a_picture_and_a_clip(folder: Path) -> None:
    words = own_process("sinkprune-serve", folder / "qwen-7b", "--port", 0, "--budget", "prune-80")
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        line = ""
        while (found := re.search(r"answers at (http://[\d.:]+/v1)", line)) is None:
            line = server.stderr.readline()
            assert line, server.wait()
        for kind, name, medium in (
            ("image_url", "kitchen.jpg", "image/jpeg"),
            ("video_url", "clip.mp4", "video/mp4"),
        ):
            url = f"data:{medium};base64,{b64encode((folder / name).read_bytes()).decode()}"
            content = [{"type": kind, kind: {"url": url}}, {"type": "text", "text": "What is on the table?"}]
            body = {"model": "qwen-7b", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
            answer = httpx.post(f"{found[1]}/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json()["sinkprune"]["budget"] == "prune-80"
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
