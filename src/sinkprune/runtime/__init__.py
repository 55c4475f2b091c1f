"""Runs a bundle: loads its engines, chains them, generates and measures. Needs no torch, transformers or onnx."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`Pipeline`, `Clip` and `VideoFile`, which were imported from here before `sinkprune` itself gave them."""
    import sinkprune

    if name not in sinkprune.__all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(sinkprune, name)
