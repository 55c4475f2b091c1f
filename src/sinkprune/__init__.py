"""Visual token pruning inside the decoder of multimodal LLMs, on exported engines.

    from sinkprune import Pipeline

The folders of the repository are the packages below this one: `runtime/chain.py` is `sinkprune.runtime.chain`.
Importing this loads neither torch nor an engine library; what it names is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module

# As `typing` has it, which takes as long to import as all that a command needs before it heeds Ctrl-C.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sinkprune.runtime.clip import Clip
    from sinkprune.runtime.pipeline import Pipeline
    from sinkprune.runtime.video_file import VideoFile

__version__ = "0.1.0"
__all__ = ["Clip", "Pipeline", "VideoFile"]

_MODULES = {
    "Clip": "sinkprune.runtime.clip",
    "Pipeline": "sinkprune.runtime.pipeline",
    "VideoFile": "sinkprune.runtime.video_file",
}


def __getattr__(name: str) -> Any:
    """A public name, its module loaded now."""
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
