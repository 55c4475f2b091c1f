"""onnxruntime-genai, which takes no model that is measured here.

It knows no LLaVA. Of Qwen2.5-VL and Qwen3-VL its builder makes the decoder alone, without DeepStack; scripts for the
tower are not in its wheel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peer_engines.engine import Form, Loaded, NotRunError, need


def forms(config: Mapping[str, Any]) -> Sequence[Form]:
    """None; the reason is said."""
    need("onnxruntime_genai", "onnxruntime-genai")
    kind, found = config["model_type"], f"onnxruntime-genai {version('onnxruntime-genai')}"
    if kind in ("qwen2_5_vl", "qwen3_vl"):
        raise NotRunError(f"the builder of {found} makes the decoder of {kind} alone, no tower")
    raise NotRunError(f"{found} has no model of type {kind}")


def prepare(form: Form, place: Path) -> None:
    """There is no form."""
    raise NotImplementedError


def load(form: Form, place: Path, threads: int) -> Loaded:
    """There is no form."""
    raise NotImplementedError
