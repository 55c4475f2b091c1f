"""What the model sees of a picture whose sides are cut off."""

from __future__ import annotations

import numpy as np

from sinkprune.contract.checks.user_warnings import warn_user
from sinkprune.contract.errors import PartlySeenWarning
from sinkprune.contract.layout import VisualLayout


def warn_if_partly_seen(layout: VisualLayout) -> None:
    """Warn (`PartlySeenWarning`) of a picture whose sides the model does not see. Python shows a warning once."""
    if layout.seen_share < 1:
        warn_user(
            f"{seen_part(layout)}. Pipeline.load(..., fit='pad') shows it all (docs/pictures.md).", PartlySeenWarning
        )


def seen_part(layout: VisualLayout) -> str:
    """Return a phrase for the part that the model sees of a picture."""
    size = layout.size
    left, top = np.clip(layout.boxes[:, :2].min(axis=0), 0, size)
    right, bottom = np.clip(layout.boxes[:, 2:].max(axis=0), 0, size)
    middle = f"{right - left:.0f}x{bottom - top:.0f} of {size[0]}x{size[1]}"
    return f"the model sees {percent(layout.seen_share)} of the picture (the middle {middle})"


def percent(seen_share: float) -> str:
    """Return a share between 0 and 1, both excluded, in words that are neither 0 % nor 100 %."""
    return f"{min(99, round(100 * seen_share)) or 'less than 1'} %"
