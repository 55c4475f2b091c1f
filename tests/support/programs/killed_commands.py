"""Commands that are killed while they write a folder."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

from support.programs.commands import own_process


def kill_when(pattern: str, folder: Path, command: str, *arguments: object) -> None:
    """Run a command in a process of its own, and kill it when something in `folder` matches `pattern`.

    What is there for a moment only may be missed: then the command ends.
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
    """What commands have left beside `output`."""
    return sorted(path.name for path in output.parent.iterdir() if path.name.startswith(f".{output.name}."))
