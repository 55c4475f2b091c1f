"""onnxruntime-genai, which has no LLaVA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peer_engines.engine import Form, Loaded, NotRunError, need


def forms(config: Mapping[str, Any]) -> Sequence[Form]:
    """None; the reason is said."""
    need("onnxruntime_genai", "onnxruntime-genai")
    kind = config["model_type"]
    found = f"onnxruntime-genai {version('onnxruntime-genai')}"
    raise NotRunError(f"{found} has no model of type {kind}, or its builder makes no tower of it")


def prepare(form: Form, place: Path) -> None:
    """There is no form."""
    raise NotImplementedError


def load(form: Form, place: Path, threads: int) -> Loaded:
    """There is no form."""
    raise NotImplementedError
