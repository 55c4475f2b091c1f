"""OpenVINO as a Python library: imported here only, without its telemetry."""

from __future__ import annotations

import sys
from typing import Any

from sinkprune.contract.errors import BackendError

# Importing this module writes an identifier to the home directory, and reports the import to the vendor.
_REPORTS = "openvino.tools.ovc"
_LONGEST = 300


def import_openvino(name: str) -> Any:
    """Import the library, for the backend or target `name`; raises `BackendError`.

    A robot must not report to anybody. So openvino's model converter, which does, is hidden from the import. If other
    code imported openvino earlier, it has already reported.
    """
    known = _REPORTS in sys.modules
    if not known:
        sys.modules[_REPORTS] = None  # type: ignore[assignment]
    try:
        import openvino
        import openvino.frontend.onnx
        import openvino.op.util
        import openvino.opset15
    except ImportError as error:
        raise BackendError(
            f"'{name}' needs openvino, and its import failed: {error}. "
            "Install it with: pip install 'sinkprune[openvino]'."
        ) from error
    finally:
        if not known:
            del sys.modules[_REPORTS]
    return openvino


def words(error: Exception) -> str:
    """Return openvino's message in one line, without its final full stop and without places in openvino's code."""
    lines = [line.strip() for line in str(error).splitlines()]
    message = " ".join(line for line in lines if line and not line.startswith("Exception from"))
    return (message or " ".join(lines))[:_LONGEST].removesuffix(".")
