"""The packages of the extra `export`, and the error for one that is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sinkprune.contract.errors import SinkpruneError

_PACKAGES = {"huggingface_hub", "ml_dtypes", "onnx", "onnx_ir", "onnxscript", "transformers"}
"""The names under which they are imported."""


@contextmanager
def report_missing_package(doing: str) -> Iterator[None]:
    """Raise `SinkpruneError` for a package that `doing` needs and cannot import, whenever the import happens."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        raise SinkpruneError(
            f"{doing} needs the package '{package}', which is not installed. "
            "Install it with: pip install 'sinkprune[export]' (Python 3.11 or later)."
        ) from error
