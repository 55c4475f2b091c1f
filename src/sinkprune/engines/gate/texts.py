"""The whole chain of engines beside that of graphs: what they say, and where they part."""

from __future__ import annotations

import numpy as np

from sinkprune.engines.gate.limits import Rounding, gap_limit
from sinkprune.engines.gate.question import Question
from sinkprune.engines.gate.recording import Recording, Said, ask
from sinkprune.engines.gate.report import TextReport
from sinkprune.runtime.pipeline import Pipeline


def compare_texts(
    pipeline: Pipeline, question: Question, recording: Recording, rounding: Rounding
) -> list[TextReport]:
    """Each answer of `recording` beside what `pipeline`, which loaded the engines, says to the same `question`.

    Where two part, both tokens must have been nearly as likely by the graphs: see `gap_limit`. Raises what asking
    raises.
    """
    reports = []
    for number, expected in enumerate(recording.answers):
        found, _ = ask(pipeline, question, expected.method, expected.budget)
        same = next(
            (
                place
                for place, tokens in enumerate(zip(found.token_ids, expected.token_ids, strict=True))
                if tokens[0] != tokens[1]
            ),
            len(expected.token_ids),
        )
        gap = 0.0
        if same < len(expected.token_ids):
            logits = recording.logits(number)[same].astype(np.float64)
            gap = float((logits[expected.token_ids[same]] - logits[found.token_ids[same]]) / logits.std())
        alike = _alike(found, expected)
        limit = gap_limit(rounding, alike)
        reports.append(
            TextReport(
                method=expected.method,
                budget=expected.budget,
                expected=expected.text,
                found=found.text,
                tokens=len(expected.token_ids),
                same_tokens=same,
                gap=gap,
                gap_limit=limit,
                kept_alike=alike,
                passed=limit is None or gap <= limit,
            )
        )
    return reports


def _alike(found: Said, expected: Said) -> float:
    """The smallest share of the tokens of a step that are the same."""
    return min(len(set(own) & set(other)) / len(other) for own, other in zip(found.kept, expected.kept, strict=True))
