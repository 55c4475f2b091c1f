"""The repository that the tests stand in."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]
