"""pi0.5: the image side of pi0."""

from __future__ import annotations

from sinkprune.runtime.families.pi0 import Pi0


class Pi05(Pi0):
    """The image side of a pi0.5 bundle."""
