"""Commands with one fault each, for the tests of the fuzzer."""

from __future__ import annotations

import json
import os
import subprocess
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


def chatters(arguments: Sequence[str]) -> int:
    sys.stderr.write("W0101 a library's warning\n")
    return refuses(arguments)


def paints(arguments: Sequence[str]) -> int:
    sys.stderr.write("error: '\x1b[31mred' is no bundle.\n")
    return 2


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


def devours_and_says_so(arguments: Sequence[str]) -> int:
    try:
        return len(bytearray(64 << 30)) and 0
    except MemoryError:
        sys.stderr.write("error: out of memory. Get more.\n")
        return 2


def litters(arguments: Sequence[str]) -> int:
    Path("out.partial").write_text("half", encoding="utf-8")
    return refuses(arguments)


def litters_elsewhere(arguments: Sequence[str]) -> int:
    Path(arguments[0]).write_text("stray", encoding="utf-8")
    return well(arguments)


def overwrites(arguments: Sequence[str]) -> int:
    Path("input.txt").write_text("changed", encoding="utf-8")
    return refuses(arguments)


def starts_a_program(arguments: Sequence[str]) -> int:
    return subprocess.run(["true"], check=True).returncode


def runs_foreign_code(arguments: Sequence[str]) -> int:
    exec(compile("x = 1", str(Path("evil.py").absolute()), "exec"), {})
    return 0
