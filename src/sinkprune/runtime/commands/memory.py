"""The memory that a command needs, compared with the free memory before anything is loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.errors import BackendError
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.schedule import schedule
from sinkprune.contract.system.memory_need import LEAST_REPORTED_BYTES, memory_line, running_need
from sinkprune.contract.system.system_memory import available_bytes
from sinkprune.runtime.backends.known import KNOWN
from sinkprune.runtime.backends.openvino.devices import Gpu
from sinkprune.runtime.backends.openvino.library import import_openvino
from sinkprune.runtime.commands import Options, chosen_backend
from sinkprune.runtime.device import open_device

_TEMPLATE_TOKENS = 64
"""A generous estimate of what a chat template adds to a question."""
_LETTERS_A_TOKEN = 2
_WAY_OUT = "give fewer or smaller pictures and fewer new tokens, or export with --weights int4"


class MemoryCheck(NamedTuple):
    """The memory that a command needs, and the free memory."""

    needed_bytes: int
    free_bytes: int | None
    """None where it is unknown."""


def check_memory(
    options: Options,
    bundle: Bundle,
    layouts: Sequence[VisualLayout],
    method: str,
    budgets: Sequence[str],
    prompt: str | Sequence[str],
    new_tokens: int,
) -> MemoryCheck:
    """Check that the memory for a request at the largest of `budgets` is free, and print the need if it is large.

    `layouts` are those of its pictures. Raises `TooLittleMemoryError`, and what `opened_engines` raises.
    """
    manifest, backend = bundle.manifest, chosen_backend(options, bundle)
    letters = len(prompt) if isinstance(prompt, str) else sum(map(len, prompt))
    tokens = letters // _LETTERS_A_TOKEN + _TEMPLATE_TOKENS + new_tokens
    # A longer request is rejected for its length, not for its memory.
    tokens = min(tokens, manifest.language_model.max_positions)
    built = options.engines is not None or bundle.engines is not None
    schedules = [schedule(manifest, method, budget, layouts) for budget in budgets]
    needs = [
        running_need(manifest, KNOWN[backend].memory, built=built, layouts=layouts, planned=planned, tokens=tokens)
        for planned in schedules
    ]
    need, free = max(needs, key=lambda need: need.bytes), free_bytes(backend)
    need.check(f"'{bundle.path}' on {backend}", free, _WAY_OUT)
    # Without the fixed part, because libraries need that for any bundle.
    if need.bytes - need.fixed >= LEAST_REPORTED_BYTES:
        sys.stderr.write(f"{memory_line(need, free)}\n")
    return MemoryCheck(need.bytes, free or None)


def free_bytes(backend: str) -> int:
    """Return the free bytes of the memory that a backend computes in, by the backend's name; 0 where unknown.

    For a GPU this opens its library, and ignores errors: opening the backend raises them later.
    """
    if not KNOWN[backend].on_gpu:
        return available_bytes()
    try:
        if KNOWN[backend].target == "openvino":
            return Gpu(import_openvino(backend).Core(), backend, None, "fastest").free_bytes()
        return open_device().memory()[0]
    except BackendError:
        return 0
