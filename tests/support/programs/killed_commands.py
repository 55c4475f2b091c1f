"""Kills commands while they write a folder."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

from support.programs.commands import own_process


def kill_when(pattern: str, folder: Path, command: str, *arguments: object) -> None:
    """Run a command in a new process, and kill it when something in `folder` matches `pattern`.

    The command ends by itself if the match is too short to be found.
    """
    words = own_process(command, *arguments)
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not any(folder.glob(pattern)) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.kill()
        _, stderr = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), stderr


def left(output: Path) -> list[str]:
    """Return the temporary files and folders next to `output`."""
    return sorted(path.name for path in output.parent.iterdir() if path.name.startswith(f".{output.name}."))
