"""A program that kills processes while they replace a folder, and reads the folder after each.

`kill_replacing.py FOLDER {calls,random} COUNT` kills at the first `COUNT` system calls, each
once, or at `COUNT` random moments. It prints a JSON list of the outcomes. It is a program because it forks often.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from sinkprune.contract.files.folders import recover
from support.programs.listed_folders import KIND, replace, whole_version


def forked(body: Callable[[], None], after: float | None = None) -> bool:
    """Run `body` in a new process, kill it after some seconds, and return whether it was killed."""
    process = os.fork()
    if process == 0:
        try:
            body()
        finally:
            # Without the end and the handlers of this program.
            os._exit(0 if sys.exc_info()[0] is None else 1)
    if after is not None:
        time.sleep(after)
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def killed_at_call(number: int, body: Callable[[], None]) -> None:
    """Run `body`, and kill this process before the system call of this number."""
    left = number

    def count(frame: FrameType, event: str, function: Any) -> None:
        nonlocal left
        if event == "c_call" and function.__module__ in ("posix", "fcntl"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    body()


def found(output: Path) -> int | None:
    """Return the version that the next command finds, which must be whole; None if there is none."""
    recover(output, KIND)
    return whole_version(output) if output.exists() else None


def main() -> None:
    folder, moments, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    output, randomness = folder / "bundle", random.Random(4)
    duration, outcomes = min(timeit.repeat(lambda: replace(output, 1), number=1, repeat=5)), []
    old: int | None = 1
    for number in range(1, count + 1):
        # Sometimes there is no old folder.
        if moments == "random" and number % 5 == 0 and old is not None:
            shutil.rmtree(output)
            old = None
        new = 2 * number
        body = partial(replace, output, new)
        if moments == "calls":
            killed = forked(partial(killed_at_call, number, body))
        else:
            killed = forked(body, randomness.uniform(0, 1.5 * duration))
        seen, version, left = output.exists(), found(output), None
        words: dict[int | None, str] = {new: "new", old: "old" if old is not None else "nothing"}
        # At random moments, some processes find the remains of several others.
        if moments == "calls" or number % 3 == 0:
            replace(output, new + 1)
            left = sorted(path.name for path in folder.iterdir())
        outcomes.append({"killed": killed, "seen": seen, "found": words[version], "left": left})
        old = found(output)
        if moments == "calls" and not killed:
            break
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    main()
