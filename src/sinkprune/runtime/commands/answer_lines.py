"""What commands print about an answer, or about the chunks of actions that came late."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sinkprune.contract.checks.format_value import counted
from sinkprune.contract.checks.terminal import escaped
from sinkprune.runtime.acting.report import ActionDeadline
from sinkprune.runtime.steps.answer import Answer, DeadlineReport

CUT_OFF = {"length": "--max-new-tokens", "deadline": "--deadline-ms"}
"""The option that ended an answer, by `Answer.finish`, of an answer that was cut off."""


def result_lines(answer: Answer) -> str:
    """Return what stands below the text of an answer: its times, and the confidence of closed lists."""
    choices = [readable(f"{share:.3f} {text}\n") for text, share in answer.choices.items()]
    return f"\n{_timings(answer)}\n" + "".join(choices)


def _timings(answer: Answer) -> str:
    per_token, ended = answer.ms["per_token"], ""
    if answer.finish in CUT_OFF:
        tokens = counted(1 if answer.choices else len(answer.token_ids), "token")
        ended = f"; cut off after {tokens} ({CUT_OFF[answer.finish]})"
    return (
        f"[{answer.budget}] TTFT {answer.ms['ttft']:.0f} ms ("
        + ", ".join(f"{part} {answer.ms[part]:.0f}" for part in ("preprocess", "vision", "prefill"))
        + "), "
        + (f"{per_token:.1f} ms a token, " if per_token is not None else "")
        + f"{answer.ms['latency']:.0f} ms in all; visual tokens {answer.visual_tokens} -> "
        f"{answer.tokens_per_layer[0]} -> {answer.tokens_per_layer[-1]}{ended}{_in_time(answer)}"
    )


def _in_time(answer: Answer) -> str:
    """Return a line about the answer's deadline, after a line break, and nothing without one."""
    deadline = answer.deadline
    if deadline is None:
        return ""
    unit = "passes over the list" if answer.choices else "tokens"
    tokens = f"{deadline.expected_tokens} {unit}" if deadline.expected_tokens > 1 else "the first token"
    return (
        f"\ndeadline {deadline.deadline_ms:g} ms: answered in {_measured(deadline)} ms, with reading the "
        f"picture, expected {tokens} in {deadline.predicted_ms:.0f} ms; {deadline.reason}"
    )


def cut_off_line(answer: Answer) -> str:
    """Return a warning for an answer with a form or from a closed list that was cut off."""
    if answer.choices:
        return (
            "warning: the time ended before all answers were scored. So only the first token of each was compared, "
            "and the confidence is that of first tokens. Give a larger --deadline-ms.\n"
        )
    return (
        f"warning: the answer was cut off after {counted(len(answer.token_ids), 'token')}, so it may not have the "
        "form. Give a larger --max-new-tokens or --deadline-ms.\n"
    )


def late_line(deadline: DeadlineReport) -> str:
    """Return a warning for a late answer, and nothing for one in time."""
    if deadline.met:
        return ""
    soonest = "" if deadline.can_meet else f"a token sooner than in {deadline.predicted_first_ms:.0f} ms"
    return f"late: {_late(deadline, soonest)}\n"


def late_chunks_line(deadlines: Sequence[ActionDeadline]) -> str:
    """Return a warning for the late ones of some chunks, and nothing where all were in time."""
    late = [each for each in deadlines if not each.met]
    if not late:
        return ""
    last = late[-1]
    soonest = "" if last.can_meet else f"a chunk sooner than in {last.expected_ms:.0f} ms"
    found = f"{len(late)} of {len(deadlines)} chunks; the last of them: " if len(deadlines) > 1 else ""
    return f"late: {found}{_late(last, soonest)}\n"


def _late(deadline: DeadlineReport | ActionDeadline, soonest: str) -> str:
    """Return how late an answer or a chunk was, and what no budget was expected to bring, if anything."""
    late = f"{_measured(deadline)} ms where {deadline.deadline_ms:g} were given, at budget {deadline.budget}."
    return f"{late} No budget was expected to bring {soonest}." if soonest else late


def _measured(deadline: DeadlineReport | ActionDeadline) -> str:
    """Return the measured milliseconds, whole ones unless a late answer would look in time."""
    measured = deadline.measured_ms
    rounded = (f"{measured:.{digits}f}" for digits in range(6))
    return next((text for text in rounded if deadline.met or float(text) > deadline.deadline_ms), str(measured))


def readable(text: str) -> str:
    """Return text for stdout: escaped on a terminal, unchanged for a program."""
    return escaped(text, keep="\n\t") if sys.stdout.isatty() else text
