"""Checkpoints to bundles. This module has what works without the packages of the extra `export`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sinkprune.contract.checks import WholeNumber, install_command
from sinkprune.contract.errors import SinkpruneError

MAX_IMAGES = WholeNumber("--max-images", 1, 10**4)
CHUNK = WholeNumber("--chunk", 1, 1 << 10)
MAX_FRAMES = WholeNumber("--max-frames", 0, 10**5)
MIN_PIXELS = WholeNumber("--min-pixels", 1, 1 << 24)
MAX_PIXELS = WholeNumber("--max-pixels", 1, 1 << 28)

IMAGE_TOKENS = 1280
"""The visual tokens that an image has at most, without --max-pixels."""
CLIP_TOKENS = 6 * IMAGE_TOKENS
"""The visual tokens that a clip has at most in all, without --max-pixels. TensorRT ranks half of them."""

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
            f"Install it with Python 3.11 or later: {install_command('export')}."
        ) from error
