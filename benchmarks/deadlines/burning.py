"""Load on this machine: processes that burn its cores, in turns of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from sinkprune.contract.child_processes import python_command

_PROGRAM = """
import sys, time
on, off = float(sys.argv[1]), float(sys.argv[2])
while True:
    end = time.monotonic() + on
    while time.monotonic() < end:
        sum(range(10000))
    time.sleep(off)
"""


@contextmanager
def burning(processes: int, on: float, off: float) -> Iterator[None]:
    """While the block runs, so many processes burn a core each, `on` seconds of each `on` + `off`."""
    command = python_command(_PROGRAM, str(on), str(off))
    with ExitStack() as stack:
        for _ in range(processes):
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
        yield
