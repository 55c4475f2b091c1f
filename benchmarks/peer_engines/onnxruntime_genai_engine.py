"""onnxruntime-genai, which has no LLaVA."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from peer_engines.engine import Form, Loaded, NotRunError, need
from sinkprune.export.presets import PRESETS


def forms(model: str) -> Sequence[Form]:
    """None; the reason is said."""
    need("onnxruntime_genai", "onnxruntime-genai")
    kind = PRESETS[model]["model_type"]
    found = f"onnxruntime-genai {version('onnxruntime-genai')}"
    raise NotRunError(f"{found} has no model of type {kind}, or its builder makes no tower of it")


def prepare(form: Form, place: Path) -> None:
    """There is no form."""
    raise NotImplementedError


def load(form: Form, place: Path, threads: int) -> Loaded:
    """There is no form."""
    raise NotImplementedError
