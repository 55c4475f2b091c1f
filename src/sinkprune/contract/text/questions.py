"""Questions about pictures: how they are put to a model, and when its reply is right."""

from __future__ import annotations

import string
from dataclasses import dataclass

_CHOOSE = "Answer with the option's letter from the given choices directly."


@dataclass(frozen=True)
class Question:
    """A question about one picture, with the answers that are accepted."""

    id: str
    kind: str
    """What is asked for, as accuracy is broken down by it: `counting`, `reading`, ..."""
    text: str
    answers: tuple[str, ...]
    """Replies that are right; for multiple choice the letter of the right option."""
    options: tuple[str, ...] = ()
    """Multiple choice: up to 26 options, lettered A, B, ..."""

    @property
    def prompt(self) -> str:
        """The words the model is asked; multiple choice in the form LLaVA-1.5 is evaluated with."""
        if not self.options:
            return self.text
        lettered = [
            f"{letter}. {option}" for letter, option in zip(string.ascii_uppercase, self.options, strict=False)
        ]
        return "\n".join([self.text, *lettered, _CHOOSE])

    @property
    def in_words(self) -> str:
        """The first right answer; of multiple choice the right option's own words."""
        return self.options[string.ascii_uppercase.index(self.answers[0])] if self.options else self.answers[0]

    def is_right(self, reply: str) -> bool:
        """Whether `reply` is one of the answers, but for case, punctuation at its ends and white space.

        Of multiple choice the right option's own words are as right as its letter, as MMBench's evaluation has it.
        """
        return _plain(reply) in map(_plain, (*self.answers, self.in_words))


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(string.punctuation + " ")
