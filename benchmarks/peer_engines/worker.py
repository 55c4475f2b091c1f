"""The process of one form, which loads once and then answers questions from standard input.

`process.py` starts it with the arguments ENGINE FORM FOLDER THREADS [--prepare]. Questions and answers are lines of
JSON. Output of libraries goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peer_engines.engine import NotRunError, Question, engine
from sinkprune.export.checkpoint.folder import read_json
from sinkprune.runtime.profiling.profile import WHOLE, PeaksOfStages


def main(arguments: list[str]) -> int:
    """Run the process; returns the exit code."""
    name, form_name, folder, threads, *rest = arguments
    # Keep stdout for messages, because libraries print to it.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    place = Path(folder)
    try:
        module = engine(name)
        config = read_json(place / "checkpoint", "config.json")
        form = next(form for form in module.forms(config) if form.name == form_name)
        if rest == ["--prepare"]:
            module.prepare(form, place)
            say(prepared=True)
            return 0
        memory, start = PeaksOfStages(), time.perf_counter()
        with memory.watch():
            loaded = module.load(form, place, int(threads))
        say(
            load_seconds=time.perf_counter() - start,
            load_peak_bytes=memory.bytes.get(WHOLE),
            versions=dict(loaded.versions),
            decoder_bytes=loaded.decoder_bytes,
        )
        for line in sys.stdin:
            memory = PeaksOfStages()
            with memory.watch():
                timing = loaded.answer(Question(**json.loads(line)))
            say(**asdict(timing), peak_bytes=memory.bytes.get(WHOLE))
    except NotRunError as error:
        say(failed=str(error))
    except Exception as error:
        # A peer's failure is a line of the report; its traceback is in the log.
        traceback.print_exc()
        say(failed=f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}")
    return 0
