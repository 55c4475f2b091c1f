"""Which tokens may come next in an answer that must have a form."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np

from sinkprune.contract.checks import counted
from sinkprune.contract.errors import UsageError
from sinkprune.contract.precision import Array
from sinkprune.runtime.hooks import Tokens
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.text.answer_form import LIMITS, load_llguidance, reason, regex_grammar, schema_grammar
from sinkprune.runtime.text.answer_tokens import CALL_MARKS
from sinkprune.runtime.text.prompt import PromptEncoder
from sinkprune.runtime.text.tools import Tools


class Constraint(Tokens):
    """The tokens that keep an answer within a grammar.

    Stop tokens are allowed where the answer is complete. Before `min_tokens` they are allowed only where no other
    token is, because no token is ever allowed that the grammar forbids.
    """

    def __init__(self, matcher: Any, stop: Sequence[int], forbidden: Collection[int], min_tokens: int) -> None:
        """Follow llguidance's `matcher`. `forbidden` tokens are special: they write no text."""
        super().__init__(stop, min_tokens)
        self._matcher, self._forbidden = matcher, np.array([*forbidden, *stop])

    def allowed(self, vocabulary: int) -> Array:
        """Return whether each of `vocabulary` tokens may come next, as booleans; at least one may.

        The vocabulary may be larger than the tokenizer's, or smaller. Raises `UsageError` where the tokenizer has no
        token that continues the answer, or the grammar takes too long.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.zeros(vocabulary, np.bool_)
        known = np.unpackbits(bits, bitorder="little")[:vocabulary]
        mask[: known.size] = known
        mask[self._forbidden[self._forbidden < vocabulary]] = False
        others = bool(mask.any())
        if self._matcher.is_accepting() and not (others and self._tokens < self._min_tokens):
            mask[self._stop[self._stop < vocabulary]] = True
        elif not others:
            # llguidance writes fixed text in the tokenizer's own tokens. Text such as "</s>" is a special token then.
            raise UsageError(
                "the model's tokenizer has no token that continues the answer in the given form. Change the schema, "
                "the regex or the tools: use the tokenizer's characters, and no text of its special tokens."
            )
        return mask

    def accept(self, token: int) -> None:
        """Add `token` to the answer; raises `UsageError` where the grammar takes too long."""
        super().accept(token)
        if token not in self._stop:
            self._matcher.consume_token(token)
            self._check()
            self.complete = self._matcher.is_stopped()

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        # How llguidance's error starts where no text matches.
        if (error := self._matcher.get_error()).startswith("NoExtensionBias"):
            raise UsageError("no text has the form of the answer. Correct the regex, the schema or the tools.")
        raise UsageError(
            f"the form of the answer is too complex: {reason(error)}. Simplify the schema, the regex or the tools."
        )


class Grammars:
    """Makes the constraints of a model's answers. llguidance reads the tokenizer when the first is made."""

    def __init__(self, prompts: PromptEncoder, stop: Sequence[int]) -> None:
        """Use the tokenizer of `prompts`; `stop` are the model's stop tokens."""
        self._prompts, self._stop = prompts, stop
        self._made: Any = None
        self._making = Lock()

    def __call__(self, request: Request) -> tuple[Request, Tokens]:
        """Return the request, and its hook; raises what `constraint` does."""
        return request, self.constraint(request.schema, request.regex, request.min_new_tokens, request.tools)

    def constraint(
        self, schema: Mapping[str, Any] | None, regex: str | None, min_tokens: int, tools: Tools | None = None
    ) -> Tokens:
        """Return the constraint of one answer, for a checked `schema` or `regex`, for calls of `tools`, or none.

        Raises `UsageError` for a form that is too complex, and where llguidance cannot use the tokenizer.
        """
        if schema is None and regex is None and tools is None:
            return Tokens(self._stop, min_tokens)
        library, tokenizer = load_llguidance(), self._tokenizer()
        # What the decoder takes from the start of an answer is no part of its text.
        lead = " " if tokenizer.decode_bytes(self._prompts.answer_ids("a")).startswith(b" ") else ""
        if schema is not None:
            grammar = schema_grammar(schema, lead)
        elif regex is not None or tools is None:
            grammar = regex_grammar(regex or "", lead)
        else:
            begin, end = (self._mark(text, tokenizer) for text in CALL_MARKS)
            grammar = tools.grammar(begin, end, lead)
        matcher = library.LLMatcher(tokenizer, grammar, log_level=0, limits=library.LLParserLimits(**LIMITS))
        constraint = Constraint(matcher, self._stop, self._prompts.special_ids, min_tokens)
        constraint.allowed(tokenizer.vocab_size)
        return constraint

    def _mark(self, text: str, tokenizer: Any) -> int | None:
        """Return the token that llguidance's `tokenizer` has for a mark of calls; None if the mark is plain text."""
        token: int | None = self._prompts.tokenizer.token_to_id(text)
        return token if token is not None and tokenizer.is_special_token(token) else None

    def _tokenizer(self) -> Any:
        with self._making:
            if self._made is None:
                try:
                    text = self._prompts.tokenizer.to_str()
                    self._made = load_llguidance().LLTokenizer(text, eos_token=list(self._stop))
                except ValueError as error:
                    raise UsageError(
                        f"llguidance cannot use the model's tokenizer: {reason(str(error))}. Leave out schema, "
                        "regex and tools, or give a closed list of answers as choice."
                    ) from error
            return self._made


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
