"""A request: pictures, the texts around them, and the options of the answer. It is checked once, when it is made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from PIL import Image

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.checks.arguments import check_options, check_type
from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.checks.ranges import RealNumber, WholeNumber
from sinkprune.contract.errors import ImageError, PromptError, UsageError
from sinkprune.runtime.media.clip import Clip, Shown
from sinkprune.runtime.media.video_file import VideoFile
from sinkprune.runtime.steps.pictures import PictureLike, check_order, with_order
from sinkprune.runtime.text.sampling import Sampler

DEFAULT_NEW_TOKENS = 128
"""The default limit of an answer's tokens; lower where engines were built for fewer."""
# More than any model has positions. The limit of a bundle's model is checked with the prompt.
MAX_NEW_TOKENS = WholeNumber("max new tokens", 1, 10**7)
MIN_NEW_TOKENS = WholeNumber("min new tokens", 0, 10**7)
DEADLINE_MS = RealNumber("deadline ms", 1, 86_400_000, "milliseconds, from 1 to 86400000 (a day)")


@dataclass(frozen=True, eq=False)
class Request:
    """A question about pictures, and the options of its answer.

    `new_request` makes one from a picture or a list, and a question or the texts around the pictures. Raises
    `ImageError`, `PromptError` and `UsageError` for a request that no bundle can answer.
    """

    pictures: tuple[PictureLike, ...]
    texts: tuple[str, ...]
    """One before each picture, and one after the last."""
    budget: str = UNPRUNED
    """A budget of the bundle, as in `retain-64`; `none` runs unpruned. With a deadline, the largest that may be
    chosen."""
    method: str = "sinkpruner"
    """A method of the bundle, as `sinkprune-export --methods` names them."""
    max_new_tokens: int = DEFAULT_NEW_TOKENS
    """The largest number of tokens of the answer."""
    min_new_tokens: int = 0
    """Stop tokens and stop strings are ignored before so many tokens."""
    stop: Sequence[str] = field(default=(), kw_only=True)
    """Strings that end the answer, as in ("\\n", "Question:"); the text ends before them. A single str is one string.
    `Answer.token_ids` has all tokens, also those of the string."""
    system: str | None = field(default=None, kw_only=True)
    """A system message for the checkpoint's chat template; None leaves it to the template."""
    temperature: float = 0.0
    """0 takes the likeliest token; larger values sample more freely."""
    top_p: float = 1.0
    """Sample from the likeliest tokens only, up to this probability."""
    seed: int | None = None
    """The same seed samples the same answer; None samples a new answer each time."""
    deadline_ms: float | None = None
    """Milliseconds until the whole answer must be complete. A budget is chosen for it, and the answer ends in time;
    None for no deadline."""

    def __post_init__(self) -> None:
        for name in ("pictures", "texts"):
            check_type(name, getattr(self, name), (tuple, list), "a tuple, or what new_request takes")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, example in (("budget", "retain-64"), ("method", "sinkpruner")):
            if not isinstance(getattr(self, name), str):
                raise UsageError(
                    f"{name} is {format_value(getattr(self, name))}, expected a name, as in '{example}'."
                )
        for name, count in (("max_new_tokens", MAX_NEW_TOKENS), ("min_new_tokens", MIN_NEW_TOKENS)):
            # As int, because numpy's small integers overflow in sums.
            object.__setattr__(self, name, count.check(getattr(self, name)))
        if self.deadline_ms is not None:
            object.__setattr__(self, "deadline_ms", DEADLINE_MS.check(self.deadline_ms))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        if self.system is not None:
            _check_text("system message", self.system)
        self.new_sampler()
        for picture in self.pictures:
            _check_picture(picture)
        check_texts(self.texts, len(self.pictures))

    def new_sampler(self) -> Sampler:
        """Return the sampler of one answer; raises `UsageError` for settings out of range."""
        return Sampler(self.temperature, self.top_p, self.seed)


def new_request(
    pictures: PictureLike | Sequence[PictureLike], prompt: str | Sequence[str], order: str = "rgb", **options: object
) -> Request:
    """Return the request about one picture or a list; `options` are the fields of `Request` after `texts`.

    A `prompt` of one text follows the pictures. A list of texts surrounds them: one before each picture, and one
    after the last. `order` is that of the channels of arrays, also in clips: "rgb", or OpenCV's "bgr". Raises
    `ImageError`, `PromptError`, `UsageError`, and for an unknown option `OptionError`, which is also a `TypeError`.
    """
    check_options(options, [*(field.name for field in fields(Request)[2:]), "order"])
    order = check_order(order)
    given = tuple(pictures) if isinstance(pictures, (list, tuple)) else (pictures,)
    sources = tuple(with_order(source, order) for source in given)
    texts = tuple(prompt) if isinstance(prompt, (list, tuple)) else (*[""] * len(sources), prompt)
    return Request(sources, texts, **options)  # type: ignore[arg-type]


def _check_picture(picture: object) -> None:
    if not isinstance(picture, (str, os.PathLike, Image.Image, np.ndarray, Clip, VideoFile, Shown)):
        raise ImageError(
            f"the image is a {type(picture).__name__}, expected a Pillow image, a uint8 [height,width,3] array, the "
            "name of a file, a Clip or a VideoFile, or a list of these."
        )


def _stop_strings(given: object) -> tuple[str, ...]:
    """Return one string or several as a tuple; raises `UsageError` for anything else, and for empty strings."""
    strings = (given,) if isinstance(given, str) else given
    if not isinstance(strings, (tuple, list)) or not all(isinstance(one, str) and one for one in strings):
        raise UsageError(f'stop is {format_value(given)}, expected strings that are not empty, as in stop=("\\n",).')
    return tuple(strings)


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise PromptError(f"the {name} is a {type(text).__name__}, expected a str. Ask something about the image.")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise PromptError(f"the {name} is not valid UTF-8. Check the terminal's encoding.")


def check_texts(texts: Sequence[object], pictures: int) -> None:
    """Reject texts whose number does not fit the pictures, or that are all empty; raises `PromptError`."""
    for text in texts:
        _check_text("prompt", text)
    if len(texts) != pictures + 1:
        raise PromptError(
            f"the prompt has places for {len(texts) - 1} images, and {pictures} were given. Give one image for each "
            "place, or none of the places: then the images stand before the text."
        )
    if not any(str(text).strip() for text in texts):
        raise PromptError("the prompt is empty. Ask something about the image, as in --prompt 'What is this?'.")
