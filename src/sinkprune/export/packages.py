"""What the extra `export` installs, and what is said where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sinkprune.contract.errors import SinkpruneError

_PACKAGES = {"huggingface_hub", "ml_dtypes", "onnx", "onnx_ir", "onnxscript", "transformers"}
"""By the names that are imported."""


@contextmanager
def packages_told_of(doing: str) -> Iterator[None]:
    """Says which package is missing for `doing`, whenever it is first asked for; raises `SinkpruneError`."""
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
