"""The power of a Jetson, as `tegrastats` prints it."""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path

from sinkprune.contract.errors import NoSensorError, PowerError
from sinkprune.contract.system.child_processes import find_program
from sinkprune.runtime.power.sensor import SILENT_SECONDS, PowerIntegral, Reading, Sensor

COMMAND = "tegrastats"
TOTALS = (
    ("VIN",),
    ("VDD_IN",),
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),
    ("VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0"),
)
"""The rails whose sum is the power of a whole board or module. If a line has several, the first counts.

In order: Thor's board; Orin Nano and NX; AGX Orin; Thor's module on a board without a meter.
"""
# A rail's first value is its present power. The mean since the start follows, and from JetPack 7.2 on the maximum.
_RAIL = re.compile(r"(?<!\S)([A-Z][A-Z0-9_]*) (\d+)(?:mW(?:/\d+mW){0,2}|/\d+)(?!\S)")
_PERIOD_MS = 100
_QUOTED = 200
# The longest line of any board has 700 bytes.
_LONGEST_LINE = 1 << 16
# The first lines may come before the meters have been read.
_TRIED_LINES = 5


def open_tegrastats(root: Path) -> Sensor:
    """Return the power of the whole board, a reading every 100 ms.

    Raises `NoSensorError` without the command, and `PowerError` if it does not print the board's power.
    """
    path = find_program(COMMAND)
    if path is None:
        raise NoSensorError(f"there is no '{COMMAND}' in PATH, which boards with JetPack have.")
    rails = _find_rails(path)
    return Sensor(COMMAND, f"{' + '.join(rails)} of this board", lambda: _readings(path, rails))


def _find_rails(path: str) -> tuple[str, ...]:
    """Return the rails whose sum is the power of the whole board. Raises `PowerError` if they are not printed."""
    printed: set[str] = set()
    with closing(_lines(path)) as lines:
        for line in islice(lines, _TRIED_LINES):
            if found := total_rails(line):
                return found
            printed |= line.keys()
    if not printed:
        raise PowerError(
            f"'{path}' prints no power rails. Some boards print them for root only: run this command with sudo."
        )
    known = ", or ".join(" + ".join(names) for names in TOTALS)
    raise PowerError(
        f"'{path}' prints the rails {', '.join(sorted(printed))}, expected {known}: the power of this board as a "
        "whole is not known from them. Leave --power out."
    )


def _readings(path: str, rails: tuple[str, ...]) -> Generator[Reading]:
    """Yield a reading for each line that has all `rails`. Its moment is the arrival of the line.

    The line's own time stamp is ignored: it has whole seconds, and jumps when the board finds a time server.
    """
    integral, complete = PowerIntegral(), time.monotonic()
    with closing(_lines(path)) as lines:
        for line in lines:
            now = time.monotonic()
            # A line may be cut off, be a warning, or lack a rail. The integral bridges it.
            if missing := sorted(set(rails) - line.keys()):
                if now - complete > SILENT_SECONDS:
                    raise PowerError(
                        f"'{path}' has printed no {', no '.join(missing)} for {SILENT_SECONDS:.0f} seconds."
                    )
                continue
            complete, watts = now, sum(line[rail] for rail in rails) / 1e3
            yield Reading(now, integral.add(now, watts))


def _lines(path: str) -> Generator[dict[str, int]]:
    """Yield the rails of each line of a new process, which ends with this generator.

    Raises `PowerError` if it prints no more.
    """
    words = [path, "--interval", str(_PERIOD_MS)]
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
        )
    except OSError as error:
        raise PowerError(f"'{path}' cannot be started: {error.strerror}.") from error
    with process:
        try:
            yield from _parsed_lines(path, process)
        finally:
            process.kill()


def _parsed_lines(path: str, process: subprocess.Popen[bytes]) -> Iterator[dict[str, int]]:
    assert process.stdout is not None
    pipe, unread, other_words = process.stdout.fileno(), b"", ""
    while True:
        until = time.monotonic() + SILENT_SECONDS
        while b"\n" not in unread:
            if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                raise PowerError(f"'{path}' has printed no line for {SILENT_SECONDS:.0f} seconds.")
            if len(unread) > _LONGEST_LINE:
                raise PowerError(f"'{path}' prints a line without end, expected one of some hundred bytes.")
            piece = os.read(pipe, 1 << 16)
            if not piece:
                words = f": {other_words[-_QUOTED:].rstrip('.')}" if other_words else ""
                raise PowerError(f"'{path}' ended with exit code {process.wait()}{words}.")
            unread += piece
        line, _, unread = unread.partition(b"\n")
        text = line.decode(errors="replace")
        rails = parse_rails(text)
        if not rails:
            other_words = text.strip() or other_words
        yield rails


def parse_rails(line: str) -> dict[str, int]:
    """Return the present milliwatts of each rail of a line of `tegrastats`, whose format has no version."""
    return {name: int(milliwatts) for name, milliwatts in _RAIL.findall(line)}


def total_rails(rails: Mapping[str, int]) -> tuple[str, ...]:
    """Return the first of `TOTALS` that a line's `rails` have completely; empty if there is none."""
    return next((names for names in TOTALS if rails.keys() >= set(names)), ())
