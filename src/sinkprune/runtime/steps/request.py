"""A request: pictures, the texts around them, and the options of the answer. It is checked once, when it is made."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.checks import (
    RealNumber,
    WholeNumber,
    check_options,
    check_plan_names,
    check_type,
    counted,
    creation_checks_options,
    format_value,
    set_numbers,
    type_name,
    warn_user,
)
from sinkprune.contract.errors import ImageError, PromptError, UsageError
from sinkprune.runtime.media.frame import Frame, SampledFrames, UnopenedPicture, Video, is_tensor
from sinkprune.runtime.steps.pictures import PictureLike
from sinkprune.runtime.text.answer_tokens import PENALTIES, SEED, TEMPERATURE, TOP_P, Sampler
from sinkprune.runtime.text.prompt import Text, Turn, check_text

if TYPE_CHECKING:
    from sinkprune.runtime.text.tools import Tools

DEFAULT_METHOD = "sinkpruner"
DEFAULT_NEW_TOKENS = 128
"""The default limit of an answer's tokens; lower where engines were built for fewer."""
# More than any model has positions. The limit of a bundle's model is checked with the prompt.
MAX_NEW_TOKENS = WholeNumber("max_new_tokens", 1, 10**7)
MIN_NEW_TOKENS = WholeNumber("min_new_tokens", 0, 10**7)
_EMPTY = "the prompt is empty. Ask something about the image, as in 'What is this?'."
DEADLINE_MS = RealNumber("deadline_ms", 1, 86_400_000, "milliseconds, from 1 to 86400000 (a day)")
_NUMBERS: tuple[WholeNumber | RealNumber, ...] = (
    MAX_NEW_TOKENS,
    MIN_NEW_TOKENS,
    DEADLINE_MS,
    TEMPERATURE,
    TOP_P,
    SEED,
    *(one for one, _ in PENALTIES),
)

OPTIONS_OF_LOADING = ("backend", "compute", "engines", "fit", "threads")
"""Options of `Pipeline.load`, `Policy.load` and the server that requests do not have."""


@creation_checks_options
@dataclass(frozen=True, eq=False)
class Request:
    """A question about pictures, and the options of its answer.

    `new_request` makes one from a picture or a list, and a question or the texts around the pictures. Raises
    `ImageError`, `PromptError` and `UsageError` for a request that no bundle can answer.
    """

    pictures: tuple[PictureLike, ...]
    texts: tuple[Text, ...]
    """The question: one text before each of its pictures, and one after the last, as in a `Turn`."""
    budget: str = UNPRUNED
    """A budget of the bundle, as in `retain-64`; `none` runs unpruned. With a deadline, the largest that may be
    chosen."""
    method: str = DEFAULT_METHOD
    """A method of the bundle, as `sinkprune-export --methods` names them."""
    max_new_tokens: int = DEFAULT_NEW_TOKENS
    """The largest number of tokens of the answer."""
    min_new_tokens: int = 0
    """No stop token is chosen, and stop strings are ignored, before so many tokens. With `schema` or `regex`, the
    answer ends earlier where nothing can follow."""
    stop: Sequence[str] = field(default=(), kw_only=True)
    """Strings that end the answer, as in ("\\n", "Question:"); the text ends before them. A single str is one string.
    `Answer.token_ids` has all tokens, also those of the string."""
    system: Text | None = field(default=None, kw_only=True)
    """A system message for the checkpoint's chat template, or a tuple of its text parts; None leaves it to the
    template."""
    schema: Mapping[str, Any] | None = field(default=None, kw_only=True)
    """A JSON schema that the answer conforms to; `{}` stands for any JSON object. At most one of `schema`, `regex`
    and `choice` is given, without `stop`. All three are described in docs/structured-output.md."""
    regex: str | None = field(default=None, kw_only=True)
    """A regular expression that matches the whole answer."""
    choice: Sequence[str] = field(default=(), kw_only=True)
    """A closed list of answers, as in ("yes", "no"), of which the likeliest is the answer. `max_new_tokens` and
    `min_new_tokens` do not apply."""
    history: Sequence[Turn] = field(default=(), kw_only=True)
    """Earlier turns of the conversation, oldest first. `pictures` are those of all turns, in order. `new_request`
    makes turns from pairs, as in [("user", "What is on the table?"), ("assistant", "A cup.")]."""
    tools: Tools | None = field(default=None, kw_only=True)
    """Functions that the answer may call, if the checkpoint's chat template has tools (docs/server.md)."""
    tool_call_id: str | None = field(default=None, kw_only=True)
    """The id of the call in `history` whose result `texts` is; None for a question."""
    temperature: float = 0.0
    """0 takes the likeliest token; larger values sample more freely."""
    top_p: float = 1.0
    """Sample from the likeliest tokens only, up to this probability. Changes nothing at `temperature` 0."""
    seed: int | None = None
    """The same seed samples the same answer; None samples a new answer each time. Changes nothing at `temperature`
    0."""
    repetition_penalty: float | None = None
    """The factor by which tokens of the prompt and the answer become less likely, as transformers computes it; 1
    changes nothing. None takes the checkpoint's. Penalties do not apply to a `choice`."""
    presence_penalty: float = 0.0
    """What is subtracted from the logits of tokens that the answer has, from -2 to 2, as OpenAI defines it."""
    frequency_penalty: float = 0.0
    """What is subtracted from the logits of tokens for each time that the answer has them, from -2 to 2, as OpenAI
    defines it."""
    deadline_ms: float | None = None
    """Milliseconds until the whole answer must be complete. The largest budget whose predicted time for
    `max_new_tokens` meets it is chosen, so set both. The answer ends in time; None for no deadline."""

    def for_one_token(self) -> Request:
        """Return this request for one token of any form, without a deadline."""
        return replace(self, deadline_ms=None, max_new_tokens=1, min_new_tokens=0, schema=None, regex=None, choice=())

    def __post_init__(self) -> None:
        for name in ("pictures", "texts"):
            check_type(name, getattr(self, name), (tuple, list), "a tuple, or what new_request takes")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_plan_names(self.budget, self.method)
        # As Python's: numpy's small integers overflow in sums.
        set_numbers(self, _NUMBERS)
        if self.min_new_tokens > self.max_new_tokens:
            raise UsageError(
                f"min_new_tokens is {self.min_new_tokens} and max_new_tokens {self.max_new_tokens}, expected a "
                "minimum that is no larger than the maximum. Lower the minimum, or raise the maximum."
            )
        object.__setattr__(self, "stop", stop_strings(self.stop))
        formed = any(one is not None for one in (self.schema, self.regex, self.tools))
        if formed or type(self.choice) is not tuple or self.choice:
            self._check_form()
        if self.tool_call_id is not None:
            from sinkprune.runtime.text.tools import check_call_id

            check_call_id(self.tool_call_id)
        if self.system is not None:
            check_text("system message", self.system)
        for picture in self.pictures:
            check_picture(picture)
        object.__setattr__(self, "history", _checked_turns(self.history))
        check_texts(
            self.texts,
            len(self.pictures) - sum(turn.pictures for turn in self.history),
            may_be_empty=self.tool_call_id is not None,
        )

    def _check_form(self) -> None:
        # Answers without a form need none of this.
        from sinkprune.runtime.text.answer_form import check_one_form, checked_choices, checked_regex, checked_schema
        from sinkprune.runtime.text.tools import Tools

        object.__setattr__(self, "choice", checked_choices(self.choice))
        object.__setattr__(self, "regex", checked_regex(self.regex))
        object.__setattr__(self, "schema", checked_schema(self.schema))
        check_type("tools", self.tools, (Tools, type(None)), "a Tools or None")
        calls = self.tools is not None and self.tools.may_call
        forms = {"schema": self.schema, "regex": self.regex, "choice": self.choice, "tools": calls}
        check_one_form(forms, self.stop)

    @property
    def form(self) -> str | None:
        """The kind of the answer's form: `choice` for a closed list, `grammar`, or None for any text."""
        if self.choice:
            return "choice"
        return None if self.schema is None and self.regex is None and self.tools is None else "grammar"

    @property
    def follows_grammar(self) -> bool:
        """Whether `schema`, `regex` or calls of `tools` decide which tokens may come next."""
        return self.schema is not None or self.regex is not None or (self.tools is not None and self.tools.may_call)

    @property
    def penalties(self) -> list[str]:
        """The names of the penalties that the request sets to a value that changes answers."""
        return [one.name for one, neutral in PENALTIES if getattr(self, one.name) not in (None, neutral)]

    def new_sampler(self, prompt: Iterable[int] = (), repetition_penalty: float | None = None) -> Sampler:
        """Return the sampler of one answer to a `prompt` of these tokens.

        `repetition_penalty` is the checkpoint's own.
        """
        own = repetition_penalty if self.repetition_penalty is None else self.repetition_penalty
        penalties = None
        if not self.choice and (own not in (None, 1.0) or self.penalties):
            from sinkprune.runtime.text.penalties import Penalties

            penalties = Penalties(own or 1.0, self.presence_penalty, self.frequency_penalty, prompt)
        return Sampler(self.temperature, self.top_p, self.seed, penalties)


REQUEST_OPTIONS = tuple(field.name for field in fields(Request)[2:])
"""Options of a request, as `Pipeline.generate` takes them."""


def new_request(
    pictures: PictureLike | Sequence[PictureLike], prompt: str | Sequence[Text], order: str = "rgb", **options: object
) -> Request:
    """Return the request about one picture or a list; `options` are the fields of `Request` after `texts`.

    A `prompt` of one text follows the pictures. A list of texts surrounds them: one before each picture, and one
    after the last. The texts of a `history` may surround pictures in the same way. If neither has places for them,
    the pictures are those of the user's first turn. The checkpoint's chat template decides where it writes the
    pictures of a turn (docs/pictures.md). `()` in the place of pictures asks a question without one. `order` is
    that of the channels of arrays, also in clips: "rgb", or OpenCV's "bgr".

    Raises `ImageError`, `PromptError`, `UsageError`, and for an unknown option `OptionError`, which is also a
    `TypeError`. Warns (`UserWarning`) of `top_p` and `seed` at `temperature` 0, of penalties with a `choice`,
    and of "bgr" without an array.
    """
    check_request_options(options)
    if isinstance(pictures, list) and not pictures:
        raise ImageError(
            "the list of images is empty, expected at least one image. Give () for a question without an image."
        )
    sources = tuple(pictures) if isinstance(pictures, (list, tuple)) else (pictures,)
    if order != "rgb" or any(map(is_tensor, sources)):
        from sinkprune.runtime.steps.channel_order import ordered

        sources = ordered(sources, order)
    if "choice" in options:
        from sinkprune.runtime.text.answer_form import given_choices

        given_choices(options["choice"])
    texts = tuple(prompt) if isinstance(prompt, (list, tuple)) else (prompt,)
    history = [*_checked_turns(options.pop("history", ()))]
    places = sum(turn.pictures for turn in history) + len(texts) - 1
    first = next((number for number, turn in enumerate(history) if turn.role == "user"), None)
    if first is not None and not places:
        # The conversation began with the pictures.
        history[first] = replace(history[first], texts=(*[""] * len(sources), *history[first].texts))
    elif not isinstance(prompt, (list, tuple)):
        texts = (*[""] * (len(sources) - places), prompt)
    request = Request(sources, texts, history=history, **options)  # type: ignore[arg-type]
    unused = [name for name, default in (("top_p", 1.0), ("seed", None)) if getattr(request, name) != default]
    if unused and not request.temperature:
        warn_user(greedy_note(unused))
    if request.choice and request.penalties:
        warn_user(choice_note(request.penalties))
    return request


def greedy_note(unused: Sequence[str]) -> str:
    """Return sentences about the sampling options `unused` of a greedy request."""
    return f"{' and '.join(unused)} changed nothing, because this answer is greedy. Add a temperature above 0."


def choice_note(unused: Sequence[str]) -> str:
    """Return sentences about the options `unused` of a request for a closed list."""
    return f"{' and '.join(unused)} changed nothing: the texts of a closed list are scored whole."


def check_request_options(given: Iterable[str], *others: str) -> None:
    """Raise `OptionError` for names that are neither options of `new_request` nor of `others`."""
    elsewhere = dict.fromkeys(OPTIONS_OF_LOADING, "Pipeline.load, not of a request")
    check_options(given, [*REQUEST_OPTIONS, "order", *others], elsewhere)


def check_picture(picture: object) -> None:
    """Raise `ImageError` for an object that is no picture."""
    known = (str, os.PathLike, Image.Image, np.ndarray, Frame, Video, UnopenedPicture, SampledFrames)
    if not isinstance(picture, known):
        raise ImageError(
            f"found {type_name(picture)} as the image, expected a Pillow image, a uint8 [height,width,3] array, "
            "the name of a file, a Clip or a VideoFile, or a list of these."
        )


def stop_strings(given: object) -> tuple[str, ...]:
    """Return one string or several as a tuple; raises `UsageError` for anything else, and for empty strings."""
    strings = (given,) if isinstance(given, str) else given
    if not isinstance(strings, (tuple, list)) or not all(isinstance(one, str) and one for one in strings):
        raise UsageError(f"stop is {format_value(given)}, expected strings that are not empty, as in '\\n'.")
    return tuple(strings)


def _checked_turns(history: object) -> tuple[Turn, ...]:
    if isinstance(history, (tuple, list)) and not history:
        return ()
    from sinkprune.runtime.text.tools import checked_turns

    return checked_turns(history)


def check_texts(texts: Sequence[Any], pictures: int, *, may_be_empty: bool = False) -> None:
    """Reject texts whose number does not fit the pictures, or that are all empty; raises `PromptError`."""
    check_text("prompt", (*texts,))
    if not texts:
        raise PromptError(_EMPTY)
    if len(texts) != pictures + 1:
        raise PromptError(
            f"the prompt has {counted(len(texts) - 1, 'place')} for images, and there "
            f"{'is' if pictures == 1 else 'are'} {counted(pictures, 'image')}. Give one image for each place, or "
            "none of the places: then the images stand before the text."
        )
    if not may_be_empty and not any("".join(text).strip() for text in texts):
        raise PromptError(_EMPTY)
