"""ONNX files as `onnx` reads them, weights left on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sinkprune.contract.errors import BackendError, EnginesError

if TYPE_CHECKING:
    import onnx


def read_model(path: Path) -> onnx.ModelProto:
    """The model in the ONNX file `path`, its weights left on disk.

    Raises `BackendError` where onnx is not installed, and `EnginesError` for a file that holds no ONNX model.
    """
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise BackendError(
            "building engines needs the package onnx, which is not installed. Install it with: pip install onnx"
        ) from error
    try:
        return onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise EnginesError(f"{path} holds no ONNX model ({error}). Export the bundle again.") from error
