"""The ranges of an export's options, and the usual size of images, for the command without the export's packages."""

from __future__ import annotations

from sinkprune.contract.checks import WholeNumber

MAX_IMAGES = WholeNumber("--max-images", 1, 10**4)
MAX_FRAMES = WholeNumber("--max-frames", 0, 10**5)
MIN_PIXELS = WholeNumber("--min-pixels", 1, 1 << 24)
MAX_PIXELS = WholeNumber("--max-pixels", 1, 1 << 28)

IMAGE_TOKENS = 1280
"""The visual tokens that an image has at most, without --max-pixels."""
CLIP_TOKENS = 6 * IMAGE_TOKENS
"""The visual tokens that a clip has at most in all, without --max-pixels. TensorRT ranks half of them."""
