"""The power of a Jetson, as `tegrastats` prints it."""

from __future__ import annotations

import os
import select
import subprocess
import time

from sinkprune.contract.errors import NoSensorError, PowerError
from sinkprune.contract.system.child_processes import find_program
from sinkprune.runtime.power import SILENT_SECONDS, Reading
from sinkprune.runtime.power.tegrastats_line import TOTALS, TegrastatsLine, parse_line

COMMAND = "tegrastats"
_PERIOD_MS = 100
_SHOWN = 200
# The longest line of any board has 700 bytes.
_LONGEST_LINE = 1 << 16
# Some first lines come before the meters have been read.
_TRIED_LINES = 5


class Tegrastats:
    """A `tegrastats` of our own, which prints a line ten times a second; moments are those at which lines come.

    Its wall clock is not read: it has whole seconds only, and jumps when a board finds a time server. The power
    between two lines is taken to be the mean of both.
    """

    name = "tegrastats"

    def __init__(self) -> None:
        """Finds the command, and that it tells of power. Raises `NoSensorError` and `PowerError`."""
        path = find_program(COMMAND)
        if path is None:
            raise NoSensorError(f"there is no '{COMMAND}' in PATH, which boards with JetPack have.")
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None
        self._total: tuple[str, ...] = ()
        self.start()
        try:
            self._total = self._first_total()
        finally:
            self.stop()
        self.measures = f"{' + '.join(self._total)} of this board"

    def start(self) -> None:
        self._joules, self._last = 0.0, (0.0, 0.0)
        self._unread, self._other_words = b"", ""
        words = [self._path, "--interval", str(_PERIOD_MS)]
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
            )
        except OSError as error:
            raise PowerError(f"'{self._path}' cannot be started: {error.strerror}.") from error

    def read(self) -> Reading:
        line, until = self._line(), time.monotonic() + SILENT_SECONDS
        # One may be cut off, be no such line, or lack a rail. What was used meanwhile is the mean of its neighbours.
        while missing := set(self._total) - line.rails.keys():
            if time.monotonic() > until:
                raise PowerError(
                    f"'{self._path}' has printed no {', no '.join(sorted(missing))} for {SILENT_SECONDS:.0f} seconds."
                )
            line = self._line()
        now, watts = time.monotonic(), sum(line.rails[rail] for rail in self._total) / 1e3
        before, watts_before = self._last
        if before:
            self._joules += (now - before) * (watts + watts_before) / 2
        self._last = now, watts
        return Reading(now, self._joules, line.temperatures, line.clocks)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def _line(self) -> TegrastatsLine:
        assert self._process is not None and self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        until = time.monotonic() + SILENT_SECONDS
        while b"\n" not in self._unread:
            if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                raise PowerError(f"'{self._path}' has told nothing for {SILENT_SECONDS:.0f} seconds.")
            if len(self._unread) > _LONGEST_LINE:
                raise PowerError(f"'{self._path}' prints a line without end, expected one of some hundred bytes.")
            piece = os.read(pipe, 1 << 16)
            if not piece:
                words = f": {self._other_words[-_SHOWN:].rstrip('.')}" if self._other_words else ""
                raise PowerError(f"'{self._path}' ended with exit code {self._process.wait()}{words}.")
            self._unread += piece
        text, _, self._unread = self._unread.partition(b"\n")
        line = parse_line(text.decode(errors="replace"))
        if not line.rails:
            self._other_words = text.decode(errors="replace").strip() or self._other_words
        return line

    def _first_total(self) -> tuple[str, ...]:
        lines: list[TegrastatsLine] = []
        while len(lines) < _TRIED_LINES:
            lines.append(self._line())
            if lines[-1].total_rails:
                return lines[-1].total_rails
        rails = {rail for line in lines for rail in line.rails}
        if not rails:
            raise PowerError(
                f"'{self._path}' tells of no power rails. Some boards tell them to root only: run this command with "
                "sudo."
            )
        known = ", or ".join(" + ".join(names) for names in TOTALS)
        raise PowerError(
            f"'{self._path}' tells of the rails {', '.join(sorted(rails))}, expected {known}: the power of this "
            "board as a whole is not known from them. Leave --power out."
        )
