"""OpenVINO as a Python library: imported here only, without its telemetry."""

from __future__ import annotations

import sys
from typing import Any

from sinkprune.contract.errors import BackendError

# Importing it writes an identifier to the home directory and tells its vendor that it was imported.
_REPORTS = "openvino.tools.ovc"
_LONGEST = 300


def import_openvino(name: str) -> Any:
    """The library, for the backend or target `name`; raises `BackendError`.

    A robot reports to nobody, so its converter of models, which does, is not imported along: the library takes it for
    not installed. Where somebody else imported openvino before us, what was reported then is.
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
            f"'{name}' needs openvino, which is not installed. Install it with: pip install 'sinkprune[openvino]'."
        ) from error
    finally:
        if not known:
            del sys.modules[_REPORTS]
    return openvino


def words(error: Exception) -> str:
    """What openvino said, in one line without the places in its own code, without its full stop."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = " ".join(line for line in lines if line and not line.startswith("Exception from"))
    return (told or " ".join(lines))[:_LONGEST].removesuffix(".")
