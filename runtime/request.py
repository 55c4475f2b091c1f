"""A request to a bundle: pictures, the texts around them, and how to answer. Checked once, when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.errors import PromptError, UsageError
from sinkprune.runtime.pictures import PictureLike
from sinkprune.runtime.sampling import Sampler


@dataclass(frozen=True, eq=False)
class Request:
    """What is asked, and how. Raises `PromptError` and `UsageError` for what no bundle could answer.

    `new_request` makes one of what users write: one picture or a list, a question or the texts around the pictures.
    """

    pictures: tuple[PictureLike, ...]
    texts: tuple[str, ...]
    """One before each picture, and one behind the last."""
    budget: str = UNPRUNED
    """A budget of the bundle, as in `retain-64`; `none` runs unpruned."""
    method: str = "sinkpruner"
    """A method of the bundle, as `sinkprune-export --methods` names them."""
    max_new_tokens: int = 128
    """How many tokens the answer has at most."""
    min_new_tokens: int = 0
    """Stop tokens are ignored before so many tokens."""
    temperature: float = 0.0
    """0 takes the likeliest token; larger values sample ever more freely."""
    top_p: float = 1.0
    """Sample from the likeliest tokens only, up to this probability."""
    seed: int | None = None
    """The same seed samples the same answer; None samples anew each time."""

    def __post_init__(self) -> None:
        for name, count, least in (("max", self.max_new_tokens, 1), ("min", self.min_new_tokens, 0)):
            if not isinstance(count, Integral) or count < least:
                raise UsageError(f"{name} new tokens is {count}, expected a whole number of at least {least}.")
        self.new_sampler()
        check_texts(self.texts, len(self.pictures))

    def new_sampler(self) -> Sampler:
        """Chooses the tokens of one answer; raises `UsageError` for settings out of range."""
        return Sampler(self.temperature, self.top_p, self.seed)


def new_request(
    pictures: PictureLike | Sequence[PictureLike], prompt: str | Sequence[str], **options: object
) -> Request:
    """The request about one picture or a list of them; `options` are the fields of `Request` behind `texts`.

    A `prompt` of one text stands behind the pictures; a list of texts stands around them: one before each picture and
    one behind the last. Raises `PromptError`, `UsageError`, and `TypeError` for an unknown option.
    """
    sources = tuple(pictures) if isinstance(pictures, (list, tuple)) else (pictures,)
    texts = tuple(prompt) if isinstance(prompt, (list, tuple)) else (*[""] * len(sources), prompt)
    return Request(sources, texts, **options)  # type: ignore[arg-type]


def check_texts(texts: Sequence[object], pictures: int) -> None:
    """Refuse texts that do not fit so many pictures, or say nothing; raises `PromptError`."""
    for text in texts:
        if not isinstance(text, str):
            raise PromptError(
                f"the prompt is a {type(text).__name__}, expected a str. Ask something about the image."
            )
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise PromptError("the prompt is not valid UTF-8. Check the terminal's encoding.")
    if len(texts) != pictures + 1:
        raise PromptError(
            f"the prompt has places for {len(texts) - 1} images, and {pictures} were given. Give one image for each "
            "place, or none of the places: then the images stand before the text."
        )
    if not any(str(text).strip() for text in texts):
        raise PromptError("the prompt is empty. Ask something about the image, as in --prompt 'What is this?'.")
