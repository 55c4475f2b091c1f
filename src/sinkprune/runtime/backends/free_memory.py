"""The free memory of the device that a backend computes on."""

from __future__ import annotations

from sinkprune.contract.errors import BackendError
from sinkprune.contract.system.system_memory import available_bytes
from sinkprune.runtime.backends.known import KNOWN
from sinkprune.runtime.backends.openvino.devices import Gpu
from sinkprune.runtime.backends.openvino.library import import_openvino
from sinkprune.runtime.device import open_device


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
