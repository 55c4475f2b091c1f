"""Warnings about figures that rest on few pictures, prompts or questions."""

from __future__ import annotations

import sys

from sinkprune.calibration.evaluation.intervals import wilson

PICTURES = 8
"""A mean over fewer pictures may be far from that over many."""
PROMPTS = 16
"""Weights that are rounded for fewer prompts may fit others worse."""
QUESTIONS = 100
"""The 95 % interval of an accuracy is wider than 10 points to each side where fewer questions were asked."""


def warn_few_pictures(count: int, what: str) -> None:
    """Print a line to stderr where `what`, such as "norms", was averaged over fewer than `PICTURES` pictures."""
    if count < PICTURES:
        _warn(f"{what} of {_counted(count, 'picture')} were measured, and differ from picture to picture", PICTURES)


def warn_few_prompts(count: int) -> None:
    """Print a line to stderr where weights were rounded for fewer than `PROMPTS` prompts."""
    if count < PROMPTS:
        _warn(f"weights were rounded for {_counted(count, 'prompt')}, and others may lose more", PROMPTS)


def warn_few_questions(count: int) -> None:
    """Print a line to stderr where fewer than `QUESTIONS` questions were asked: how wide an interval may be."""
    if count < QUESTIONS:
        least, most = wilson(count // 2, count)
        half = 50 * (most - least)
        _warn(f"after {_counted(count, 'question')} an accuracy is uncertain by ±{half:.0f} points", QUESTIONS)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _warn(found: str, enough: int) -> None:
    sys.stderr.write(f"warning: {found}. Use {enough} or more.\n")
