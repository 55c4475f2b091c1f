"""A program that kills processes while they replace a folder, and reads the folder after each.

`kill_replacing.py FOLDER` kills at each system call once, until a process ends by itself. It prints a JSON list of
the outcomes. It is a program because it forks often.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from sinkprune.contract.files.folders import recover
from support.programs.listed_folders import KIND, replace, whole_version


def forked(body: Callable[[], None]) -> bool:
    """Run `body` in a new process, and return whether it was killed."""
    process = os.fork()
    if process == 0:
        try:
            body()
        finally:
            # Without the end and the handlers of this program.
            os._exit(0 if sys.exc_info()[0] is None else 1)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def killed_at_call(number: int, body: Callable[[], None]) -> None:
    """Run `body`, and kill this process before the system call of this number."""
    left = number

    def counted(frame: FrameType, event: str, function: Any) -> None:
        nonlocal left
        if event == "c_call" and function.__module__ in ("posix", "fcntl"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(counted)
    body()


def found(output: Path) -> int | None:
    """Return the version that the next command finds, which must be whole; None if there is none."""
    recover(output, KIND)
    return whole_version(output) if output.exists() else None


def main() -> None:
    folder = Path(sys.argv[1])
    output, outcomes, killed = folder / "bundle", [], True
    replace(output, 1)
    old: int | None = 1
    for number in count(1):
        new = 2 * number
        killed = forked(partial(killed_at_call, number, partial(replace, output, new)))
        seen, version = output.exists(), found(output)
        words: dict[int | None, str] = {new: "new", old: "old"}
        replace(output, new + 1)
        left = sorted(path.name for path in folder.iterdir())
        outcomes.append({"killed": killed, "seen": seen, "found": words[version], "left": left})
        old = found(output)
        if not killed:
            break
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    main()
