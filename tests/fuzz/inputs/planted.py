"""Commands with one fault each, for the tests of the fuzzer."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def planted(arguments: Sequence[str]) -> int:
    """Answer as a correct command does, or with the fault that the argument names."""
    answer = [1, 2]
    match arguments[0]:
        case "another answer":
            answer = [1, 3]
        case "traceback":
            raise KeyError("heads")
        case "hang":
            time.sleep(600)
        case "abort":
            os.abort()
        case "memory":
            # More than a call may, and less than the address space that is left.
            b"x" * (1200 << 20)
        case "stray file":
            Path("out.partial").write_text("half", encoding="utf-8")
        case "escape":
            exec(compile("x = 1", str(Path("evil.py").absolute()), "exec"), {})
        case "refusal":
            sys.stderr.write("error: 'x' is no bundle. Export one.\n")
            return 2
    sys.stdout.write(json.dumps({"token_ids": answer, "text": "a cup"}) + "\n")
    return 0
