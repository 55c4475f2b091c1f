"""A warning about questions of which the model sees only a part of the picture."""

from __future__ import annotations

from collections.abc import Sequence

from sinkprune.runtime.commands.picture_notes import percent


def unseen_warnings(seen_shares: Sequence[float]) -> tuple[str, ...]:
    """Return a warning if a share is below 1, else nothing.

    `seen_shares` has one share for each question: of its picture's area, what the model sees.
    """
    partly = [share for share in seen_shares if share < 1]
    if not partly:
        return ()
    return (
        f"The model sees only a part of the picture in {len(partly)} of {len(seen_shares)} questions "
        f"({percent(min(partly))} at least). --fit pad shows it all (docs/pictures.md).",
    )
