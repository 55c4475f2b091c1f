"""tokenizer.json, checked before the tokenizers library reads it: what a stranger wrote there must not end a process.

The library takes any file that parses. Some then have it allocate by an id in the file, search for hours or end the
process: those are refused here. Whether a file says all that its parts need is the library's to tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.files.untrusted import UnreadableError, parsed_json
from sinkprune.contract.text.regular_expressions import is_quick

_IDS = 1 << 20
"""Ids are smaller: four times as many as the largest published vocabulary has."""
_LETTERS = 1000
"""The most letters of a token or of a pattern."""
_ADDED_LETTERS = 1 << 20
"""The most letters of all added tokens together: an automaton is made of them."""
_PARTS = 100
"""The most parts of a component."""
_GROWTH = 8
"""How many times as long as it was a text may become."""
_NORMALIZERS = frozenset(
    {"BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Prepend"}
    | {"Replace", "Sequence", "Strip", "StripAccents"}
)
_PRE_TOKENIZERS = frozenset(
    {"BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace", "Punctuation"}
    | {"Sequence", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"}
)
_POST_PROCESSORS = frozenset({"BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"})
_DECODERS = frozenset(
    {"BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace", "Sequence", "Strip"}
    | {"WordPiece"}
)
_COMPONENTS = {
    "normalizer": (_NORMALIZERS, "normalizers"),
    "pre_tokenizer": (_PRE_TOKENIZERS, "pretokenizers"),
    "post_processor": (_POST_PROCESSORS, "processors"),
    "decoder": (_DECODERS, "decoders"),
}
"""The types a component may have, and where one of type Sequence has its parts."""


def check_tokenizer_json(data: bytes) -> None:
    """Raises `UnreadableError` for a tokenizer.json that is damaged, or that no tokenizer needs to be."""
    root = parsed_json(data, _unique)
    if not isinstance(root, dict):
        raise UnreadableError(f"holds {type(root).__name__}, expected a JSON object")
    _check_model(_object(root.get("model"), "model"))
    _check_added(root.get("added_tokens", []))
    for name, (kinds, parts) in _COMPONENTS.items():
        steps = list(_steps(root.get(name), name, kinds, parts))
        if len(steps) > _PARTS:
            raise UnreadableError(f"has a {name} of {len(steps)} parts, expected at most {_PARTS}")
        growth = 1.0
        for step in steps:
            growth *= _check_step(step, name)
        if growth > _GROWTH:
            raise UnreadableError(f"has a {name} that makes texts {growth:.0f} times as long, expected {_GROWTH}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of two values of one name, this and the library may choose different ones."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has two values of one name")
    return found


def _check_model(model: Mapping[str, Any]) -> None:
    kind, vocab = model.get("type"), model.get("vocab")
    if kind == "Unigram":
        _check_unigram(model, vocab)
        return
    if kind not in ("BPE", "WordPiece", "WordLevel"):
        raise UnreadableError(
            f"has a model of type {format_value(kind)}, expected BPE, Unigram, WordPiece or WordLevel"
        )
    if not isinstance(vocab, dict) or not {type(number) for number in vocab.values()} <= {int}:
        raise UnreadableError("has no vocabulary that gives each token a whole number")
    if vocab and not 0 <= min(vocab.values()) <= max(vocab.values()) < _IDS:
        raise UnreadableError(f"has a vocabulary with ids that are not between 0 and {_IDS}")
    if len(set(vocab.values())) != len(vocab):
        raise UnreadableError("has a vocabulary that gives two tokens one id")
    if max(map(len, vocab), default=0) > _LETTERS:
        raise UnreadableError(f"has a vocabulary with a token of more than {_LETTERS} letters")
    unknown = model.get("unk_token")
    if not (isinstance(unknown, str) and unknown in vocab) and (unknown is not None or kind != "BPE"):
        raise UnreadableError(f"has the unknown token {format_value(unknown)}, which is not in its vocabulary")
    prefix = model.get("continuing_subword_prefix")
    if kind == "BPE" and prefix:
        # The library cuts so many bytes off the second of each pair.
        listed = model.get("merges")
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in _list(listed, "merges")]
        if not isinstance(prefix, str) or not all(
            isinstance(merge, list) and len(merge) == 2 and str(merge[1]).startswith(prefix) for merge in merges
        ):
            raise UnreadableError(f"has merges whose second part does not begin with {format_value(prefix)}")
        if not prefix.isascii():
            raise UnreadableError(f"has the continuing_subword_prefix {format_value(prefix)}, expected ASCII")
    if kind == "WordPiece":
        _check_number(model, "max_input_chars_per_word", _LETTERS)
    dropout = model.get("dropout")
    if dropout not in (None, 0):
        raise UnreadableError(f"has a dropout of {format_value(dropout)}, expected none: it is for training")


def _check_unigram(model: Mapping[str, Any], vocab: Any) -> None:
    pairs = vocab if isinstance(vocab, list) else []
    if not 0 < len(pairs) < _IDS or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise UnreadableError("has no vocabulary of tokens and scores")
    _check_letters([token for token, _ in pairs], "vocabulary")
    if not all(token for token, _ in pairs):
        raise UnreadableError("has an empty token in its vocabulary")
    unknown = model.get("unk_id")
    if not isinstance(unknown, int) or not 0 <= unknown < len(pairs):
        raise UnreadableError(f"has the unknown token {format_value(unknown)}, which is not in its vocabulary")


def _check_added(added: Any) -> None:
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise UnreadableError("has added_tokens that are no list of objects")
    contents = [token.get("content") for token in added]
    if not all(isinstance(content, str) and content for content in contents):
        raise UnreadableError("has an added token without content")
    _check_letters(contents, "added_tokens")
    if sum(map(len, contents)) > _ADDED_LETTERS:
        raise UnreadableError(f"has added_tokens of more than {_ADDED_LETTERS} letters")
    for token in added:
        _check_number(token, "id", _IDS)


def _steps(component: Any, name: str, kinds: frozenset[str], parts: str) -> Iterator[dict[str, Any]]:
    """The parts of a component, those of a Sequence one by one."""
    if component is None:
        return
    step = _object(component, name)
    kind = step.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise UnreadableError(
            f"has a {name} of type {format_value(kind)}, expected one of: {', '.join(sorted(kinds))}"
        )
    if kind != "Sequence":
        yield step
        return
    listed = step.get(parts)
    if not isinstance(listed, list):
        raise UnreadableError(f"has a {name} of type Sequence without '{parts}'")
    for part in listed:
        yield from _steps(part, name, kinds, parts)


def _check_step(step: dict[str, Any], name: str) -> float:
    """How many times as long as it was a text becomes in one part of a component."""
    kind = step["type"]
    for key in (
        "content",
        "prepend",
        "replacement",
        "delimiter",
        "prefix",
        "suffix",
        "pad_token",
        "word_delimiter_token",
    ):
        if isinstance(step.get(key), str):
            _check_letters([step[key]], f"{name}'s {key}")
    if kind in ("Replace", "Split"):
        pattern = _check_pattern(step.get("pattern"), name)
        if kind == "Split":
            return 1
        content = step.get("content")
        if not isinstance(content, str):
            raise UnreadableError(f"has a {name} of type Replace without content")
        return max(1.0, len(content) / len(pattern)) if pattern else 1.0 + len(content)
    if kind == "Strip" and name == "decoder":
        _check_number(step, "start", _PARTS)
        # The library counts back from the end of a token, past its beginning.
        _check_number(step, "stop", 1)
    if kind == "BPEDecoder" and not step.get("suffix"):
        raise UnreadableError("has a decoder that looks for no text")
    if kind == "CTC" and not (step.get("pad_token") and step.get("word_delimiter_token")):
        raise UnreadableError("has a decoder that looks for no text")
    if kind == "ByteLevel" and name in ("normalizer", "pre_tokenizer"):
        # A character for each byte
        return 4.0
    if kind == "BertNormalizer":
        return 3.0
    if kind == "FixedLength" and not _check_number(step, "length", _LETTERS):
        raise UnreadableError("has a pre_tokenizer that cuts the text into pieces of no length")
    if kind == "TemplateProcessing":
        _check_template(step)
    return 1.0


def _check_pattern(pattern: Any, name: str) -> str:
    """The text that a pattern looks for; empty for a regular expression, which may match nothing at all."""
    if not isinstance(pattern, dict) or len(pattern) != 1 or not {"String", "Regex"} & pattern.keys():
        raise UnreadableError(f"has a {name} without a pattern")
    (kind, text), *_ = pattern.items()
    _check_letters([text], f"{name}'s pattern")
    if kind == "String":
        if not text:
            raise UnreadableError(f"has a {name} that looks for no text")
        return str(text)
    if not is_quick(text):
        raise UnreadableError(
            f"has a {name} with a regular expression that could take very long: {format_value(text)}"
        )
    return ""


def _check_template(step: Mapping[str, Any]) -> None:
    """A post-processor's template writes each text once, and special tokens that it knows."""
    known = _object(step.get("special_tokens", {}), "post_processor's special_tokens")
    for name in ("single", "pair"):
        pieces = step.get(name)
        if not isinstance(pieces, list) or len(pieces) > _PARTS:
            raise UnreadableError(f"has a post_processor whose {name} is no list of at most {_PARTS} pieces")
        written = [piece for piece in pieces if isinstance(piece, dict) and "Sequence" in piece]
        special = [_object(piece, "post_processor").get("SpecialToken") for piece in pieces if piece not in written]
        names = [_object(piece["Sequence"], "post_processor").get("id") for piece in written]
        if sorted(map(str, names)) != ["A", "B"][: 1 if name == "single" else 2]:
            raise UnreadableError(f"has a post_processor whose {name} does not write each text once")
        for piece in special:
            if str(_object(piece, "post_processor").get("id")) not in known:
                raise UnreadableError("has a post_processor that writes a special token it does not know")
    for token in known.values():
        ids = _object(token, "post_processor's special_tokens").get("ids")
        if not isinstance(ids, list) or len(ids) > _PARTS:
            raise UnreadableError(f"has a post_processor with a special token of more than {_PARTS} ids, or none")
        for number in ids:
            _check_number({"id": number}, "id", _IDS)


def _check_number(fields: Mapping[str, Any], name: str, limit: int) -> int:
    """`fields[name]`, a whole number from 0 to `limit`."""
    number = fields.get(name)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < limit:
        raise UnreadableError(f"has '{name}' {format_value(number)}, expected a whole number from 0 to {limit - 1}")
    return number


def _check_letters(texts: Any, name: str) -> None:
    longest = max((len(text) if isinstance(text, str) else _LETTERS + 1 for text in texts), default=0)
    if longest > _LETTERS:
        raise UnreadableError(f"has a {name} with what is no text of at most {_LETTERS} letters")


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnreadableError(f"has a {name} that is no object")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise UnreadableError(f"has {name} that are no list")
    return value
