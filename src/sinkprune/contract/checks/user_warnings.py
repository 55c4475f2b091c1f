"""Python warnings that name the user's own line."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[2])


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with `message` at the innermost line on the stack that is outside of this package."""
    level, frame = 1, sys._getframe()
    # Python's own frozen modules run generators.
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, "<frozen")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
