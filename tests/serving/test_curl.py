"""The command of docs/server.md that calls curl."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from tests.serving.test_server import served

from sinkprune import Pipeline
from support.programs.printed_commands import blocks


@pytest.mark.skipif(not all(map(shutil.which, ("bash", "base64", "curl"))), reason="a program is not installed")
def test_the_page_s_command_gets_the_pipeline_s_answer(
    pipeline: Callable[..., Pipeline], photo: Image.Image, tmp_path: Path
) -> None:
    pipe = pipeline("gqa-112", "fp32", ("retain-64",))
    [text] = [block.text for block in blocks() if block.page == "server.md" and block.language == "bash"]
    # Larger than an argument may be.
    photo.resize((1280, 960)).save(tmp_path / "kitchen.jpg", quality=99)
    assert (tmp_path / "kitchen.jpg").stat().st_size > 128 << 10
    with served(pipe, name="llava-7b") as address:
        command = text.replace("http://127.0.0.1:8000", address)
        assert address in command
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, check=True)
    with Image.open(tmp_path / "kitchen.jpg") as read:
        expected = pipe.generate(read, "What is on the table?", budget="retain-64", max_new_tokens=16)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == expected.text
