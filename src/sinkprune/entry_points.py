"""The commands, as their scripts call them. Each returns its exit code.

Importing this loads nothing slow; `start` loads the rest.
"""

from __future__ import annotations

from functools import partial

from sinkprune.contract.command_line.command import start

_COMMAND = "sinkprune.command"

sinkprune = partial(start, _COMMAND)
"""`sinkprune VERB`: every command under one name."""
export = partial(start, _COMMAND, "export")
build = partial(start, _COMMAND, "build")
check = partial(start, _COMMAND, "check")
run = partial(start, _COMMAND, "run")
act = partial(start, _COMMAND, "act")
replay = partial(start, _COMMAND, "replay")
serve = partial(start, _COMMAND, "serve")
profile = partial(start, _COMMAND, "profile")
calibrate = partial(start, _COMMAND, "calibrate")
evaluate = partial(start, _COMMAND, "evaluate")
doctor = partial(start, _COMMAND, "doctor")
