"""What a command needs of memory, told and compared before anything is loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.schedule import schedule
from sinkprune.contract.system.memory_need import TOLD_BYTES, MemoryNeed, memory_line, running_need
from sinkprune.runtime.backends.compatibility import usual_backend
from sinkprune.runtime.backends.free_memory import free_bytes
from sinkprune.runtime.backends.known import KNOWN
from sinkprune.runtime.commands import BundleOptions
from sinkprune.runtime.families import load_family
from sinkprune.runtime.media.clip import Picture
from sinkprune.runtime.steps.pictures import layout_of

_TEMPLATE_TOKENS = 64
"""What a chat template puts around a question, generously."""
_LETTERS_A_TOKEN = 2
_WAY_OUT = "give fewer or smaller pictures and fewer new tokens, or export with --weights int4"


class Planned(NamedTuple):
    """What a command will ask, as far as memory depends on it."""

    pictures: Sequence[Picture]
    """Those of one prompt."""
    method: str
    budgets: Sequence[str]
    prompt: str | Sequence[str]
    new_tokens: int


class Memory(NamedTuple):
    """What was found."""

    needed_bytes: int
    free_bytes: int | None
    """None where the system does not tell."""


def check_memory(options: BundleOptions, bundle: Bundle, planned: Planned) -> Memory:
    """Tell on stderr what `planned` needs and what is free where it computes, if it is much.

    Raises `TooLittleMemoryError`, and what `layout_of` raises.
    """
    manifest, backend = bundle.manifest, options.backend or usual_backend(bundle)
    family = load_family(manifest, options.fit)
    layouts = [layout_of(picture, picture, family, manifest) for picture in planned.pictures]
    letters = len(planned.prompt) if isinstance(planned.prompt, str) else sum(map(len, planned.prompt))
    tokens = letters // _LETTERS_A_TOKEN + _TEMPLATE_TOKENS + planned.new_tokens
    # A longer request is refused for its length, not for its memory.
    tokens = min(tokens, manifest.language_model.max_positions)
    needs: list[MemoryNeed] = []
    for budget in planned.budgets:
        rows = schedule(manifest, planned.method, budget, layouts)
        built = options.engines is not None or bundle.engines is not None
        needs.append(
            running_need(manifest, KNOWN[backend].memory, built=built, layouts=layouts, rows=rows, tokens=tokens)
        )
    need, free = max(needs, key=lambda one: one.bytes), free_bytes(backend)
    need.check(f"'{bundle.path}' on {backend}", free, _WAY_OUT)
    # Libraries take theirs of small bundles too.
    if need.bytes - need.fixed >= TOLD_BYTES:
        sys.stderr.write(f"{memory_line(need, free)}\n")
    return Memory(need.bytes, free or None)
