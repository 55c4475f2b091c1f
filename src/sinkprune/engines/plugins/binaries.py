"""The shipped kernels: cubins and PTX by kernel, type of the tokens and GPU. Needs no Triton.

`compile.py` writes them: one archive `kernels.zip` with `index.json`, a cubin and a PTX for each entry.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from io import BytesIO
from typing import Any

from sinkprune.contract.errors import BackendError

ARCHIVE = "kernels.zip"
"""The file of all shipped kernels, next to this module."""
INDEX = "index.json"
"""The member of the archive that lists all others: kernel, type of the tokens, sm, launch parameters, sums."""

KERNELS = {
    "TopRho": ("top_rho",),
    "DiversitySelect": ("diversity_phase", "diversity_phase_unaligned"),
}
"""The names of the kernels of each plugin, by the plugin's name; `compile.py` compiles them."""


@dataclass(frozen=True)
class Binary:
    """The code of one kernel for one type of tokens and one GPU, and the parameters of its launch."""

    image: bytes
    """A cubin or PTX, for `KernelRunner`."""
    entry: str
    """The name of the function in the image."""
    threads: int
    """Threads of a block."""
    shared_bytes: int
    """Dynamic shared memory of a block, in bytes; at most 48 KiB, which a launch may use without permission."""


def binary(kernel: str, dtype: str, sm: int) -> Binary:
    """Return the cubin of `kernel` for tokens of `dtype` on exactly `sm`, e.g. 87.

    Without a cubin for `sm`, return the PTX of the highest lower one, which the driver compiles. Raises
    `BackendError` if there is neither.
    """
    shipped = _shipped(kernel, dtype)
    if sm in shipped:
        return _read(shipped[sm], shipped[sm]["cubin"])
    lower = [other for other, entry in shipped.items() if other < sm and entry["portable"]]
    if not lower:
        raise BackendError(
            f"the kernel {kernel} for {dtype} tokens is shipped for {_listed(shipped)}, and this GPU is sm_{sm}, "
            "which is older than all of them. Build the engines again on it; they then do without plugins."
        )
    return _read(shipped[max(lower)], shipped[max(lower)]["ptx"])


def sha256(plugin: str) -> str:
    """Return the sha256 over all shipped binaries of `plugin` (`TopRho` or `DiversitySelect`)."""
    sums = [entry["sha256"] for entry in _entries() if entry["kernel"] in KERNELS[plugin]]
    return hashlib.sha256("".join(sums).encode()).hexdigest()


def shipped_sms() -> tuple[int, ...]:
    """Return the GPUs that kernels are shipped for, e.g. 87 for sm_87, ascending."""
    return tuple(sorted({entry["sm"] for entry in _entries()}))


def _shipped(kernel: str, dtype: str) -> dict[int, dict[str, Any]]:
    entries = [entry for entry in _entries() if (entry["kernel"], entry["dtype"]) == (kernel, dtype)]
    if not entries:
        known = sorted({f"{entry['kernel']} for {entry['dtype']}" for entry in _entries()})
        raise BackendError(f"no kernel {kernel} for {dtype} tokens is shipped; there are {', '.join(known)}.")
    return {entry["sm"]: entry for entry in entries}


def _listed(shipped: dict[int, dict[str, Any]]) -> str:
    return ", ".join(f"sm_{sm}" for sm in sorted(shipped))


@cache
def _archive() -> bytes:
    return (files("sinkprune.engines.plugins") / ARCHIVE).read_bytes()


@cache
def _entries() -> list[dict[str, Any]]:
    return json.loads(_member(INDEX))["entries"]


def _read(entry: dict[str, Any], member: str) -> Binary:
    return Binary(_member(member), entry["entry"], entry["threads"], entry["shared_bytes"])


def _member(name: str) -> bytes:
    """Return a file of the archive; raises `BackendError` if Python cannot unpack it."""
    try:
        with zipfile.ZipFile(BytesIO(_archive())) as archive:
            return archive.read(name)
    except RuntimeError as error:
        raise BackendError(
            f"the compiled kernels cannot be unpacked: {error}. Use a Python that was built with lzma, as the "
            "system's is."
        ) from error
