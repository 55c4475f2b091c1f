"""Questions about pictures: their prompts, and the check of replies."""

from __future__ import annotations

import string
from dataclasses import dataclass

_CHOOSE = "Answer with the option's letter from the given choices directly."


@dataclass(frozen=True)
class Question:
    """A question about one picture, with the answers that are accepted."""

    id: str
    kind: str
    """The group in accuracy tables: `counting`, `reading`, ..."""
    text: str
    answers: tuple[str, ...]
    """Correct replies; for multiple choice the letter of the correct option."""
    options: tuple[str, ...] = ()
    """Multiple choice: up to 26 options, lettered A, B, ..."""
    choice: tuple[str, ...] = ()
    """A closed list of answers, in the words of `answers`; empty for open questions and multiple choice."""

    @property
    def closed_list(self) -> tuple[str, ...]:
        """Return the replies to choose from: the options' letters, or `choice`. Empty for open questions."""
        return tuple(string.ascii_uppercase[: len(self.options)]) if self.options else self.choice

    @property
    def prompt(self) -> str:
        """Return the prompt; for multiple choice in the form of LLaVA-1.5's evaluation."""
        if not self.options:
            return self.text
        lettered = [
            f"{letter}. {option}" for letter, option in zip(string.ascii_uppercase, self.options, strict=False)
        ]
        return "\n".join([self.text, *lettered, _CHOOSE])

    @property
    def in_words(self) -> str:
        """Return the first correct answer; for multiple choice the text of the correct option."""
        return self.options[string.ascii_uppercase.index(self.answers[0])] if self.options else self.answers[0]

    def is_right(self, reply: str) -> bool:
        """Return whether `reply` is one of the answers, except for case, white space and punctuation at its ends.

        For multiple choice the text of the correct option counts like its letter, as in MMBench's evaluation.
        """
        return _plain(reply) in map(_plain, (*self.answers, self.in_words))


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(string.punctuation + " ")
