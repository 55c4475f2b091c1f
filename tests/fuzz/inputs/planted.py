"""Commands with one fault each, for the tests of the fuzzer."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def well(arguments: Sequence[str]) -> int:
    sys.stdout.write(json.dumps({"token_ids": [1, 2], "text": "a cup"}) + "\n")
    return 0


def another_answer(arguments: Sequence[str]) -> int:
    sys.stdout.write(json.dumps({"token_ids": [1, 3], "text": "a cap"}) + "\n")
    return 0


def refuses(arguments: Sequence[str]) -> int:
    sys.stderr.write("error: 'x' is no bundle. Export one.\n")
    return 2


def raises(arguments: Sequence[str]) -> int:
    raise KeyError("heads")


def hangs(arguments: Sequence[str]) -> int:
    time.sleep(600)
    return 0


def aborts(arguments: Sequence[str]) -> int:
    os.abort()


def devours(arguments: Sequence[str]) -> int:
    held = []
    for _ in range(64):
        held.append(bytearray(os.urandom(1)) * (64 << 20))
    return 0


def litters(arguments: Sequence[str]) -> int:
    Path("out.partial").write_text("half", encoding="utf-8")
    return refuses(arguments)


def runs_foreign_code(arguments: Sequence[str]) -> int:
    exec(compile("x = 1", str(Path("evil.py").absolute()), "exec"), {})
    return 0
