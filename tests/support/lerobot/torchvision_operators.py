"""Runs a module as a program, in an environment whose torchvision may have no compiled operators.

    python -m support.lerobot.torchvision_operators MODULE OPTIONS

torchvision from a package index is built for CUDA, and its operators do not load next to torch's build for CPUs. Its
Python code then fails to import, because it describes two operators that do not exist. This program declares these
two, without an implementation. LeRobot's processors and servers call neither.
"""

from __future__ import annotations

import runpy
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import torch

BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_missing_operators() -> torch.library.Library | None:
    """Load torchvision's operators; if they do not load, declare two and return what keeps them declared."""
    (folder,) = find_spec("torchvision").submodule_search_locations  # type: ignore[union-attr,misc]
    with suppress(OSError):
        torch.ops.load_library(str(Path(folder) / "_C.so"))
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + BOXES)
    return library


if __name__ == "__main__":
    declared = declare_missing_operators()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
