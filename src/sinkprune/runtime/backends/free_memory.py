"""How much memory is free where a backend computes."""

from __future__ import annotations

from sinkprune.contract.errors import BackendError
from sinkprune.contract.system.system_memory import available_bytes
from sinkprune.runtime.backends.known import KNOWN
from sinkprune.runtime.backends.openvino.devices import Gpu
from sinkprune.runtime.backends.openvino.library import import_openvino
from sinkprune.runtime.device import open_device


def free_bytes(backend: str) -> int:
    """Bytes of the memory that the backend of that name computes in; 0 where nobody tells.

    A GPU's library is asked, before anything is loaded. What is missing there is told when the backend is opened.
    """
    if not KNOWN[backend].on_gpu:
        return available_bytes()
    try:
        if KNOWN[backend].target == "openvino":
            return Gpu(import_openvino(backend).Core(), backend, None, "fastest").free_bytes()
        return open_device().memory()[0]
    except BackendError:
        return 0
