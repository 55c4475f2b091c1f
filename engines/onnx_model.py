"""ONNX files as `onnx` reads them, weights left on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sinkprune.errors import BackendError

if TYPE_CHECKING:
    import onnx


def read_model(path: Path) -> onnx.ModelProto:
    """The model in an ONNX file, without its weights; raises `BackendError` if onnx is not installed."""
    try:
        import onnx
    except ImportError as error:
        raise BackendError(
            "building engines needs the package onnx, which is not installed. Install it with: pip install onnx"
        ) from error
    return onnx.load(path, load_external_data=False)
