"""The ranges of an export's options. Their bounds are larger than any model needs."""

from __future__ import annotations

from sinkprune.contract.checks.ranges import WholeNumber

MAX_IMAGES = WholeNumber("--max-images", 1, 10**4)
MAX_FRAMES = WholeNumber("--max-frames", 0, 10**5)
MIN_PIXELS = WholeNumber("--min-pixels", 1, 1 << 24)
MAX_PIXELS = WholeNumber("--max-pixels", 1, 1 << 28)
