"""Check an untrusted tokenizer.json before the tokenizers library reads it.

The library reports most damage itself. This module rejects what would make it search for hours, fill the memory or
panic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.files.untrusted import UnreadableError, parsed_json
from sinkprune.contract.text.regular_expressions import is_quick

_IDS = 1 << 20
"""The limit of ids: four times the largest published vocabulary."""
_LETTERS = 1000
"""The limit of letters of a token or of a pattern."""
_ADDED_LETTERS = 1 << 20
"""The limit of letters of all added tokens together, of which the library makes an automaton."""
_PARTS = 10
"""The limit of parts of a component, and of tokens that a post-processor adds in one place."""
_GROWTH = 8
"""The limit of a component's growth factor of text lengths."""
_COMPONENTS = {
    "normalizer": {
        "ByteLevel": 4,
        "Lowercase": 1,
        "NFC": 3,
        "NFD": 3,
        "NFKC": 3,
        "NFKD": 3,
        "Prepend": 2,
        "Strip": 1,
    },
    "pre_tokenizer": {
        "ByteLevel": 4,
        "Digits": 1,
        "Metaspace": 2,
        "Punctuation": 1,
        "Split": 1,
        "WhitespaceSplit": 1,
    },
    "post_processor": {"ByteLevel": 1, "RobertaProcessing": 1, "TemplateProcessing": 1},
    "decoder": {"ByteFallback": 1, "ByteLevel": 1, "Fuse": 1, "Metaspace": 1, "Strip": 1},
}
"""The types of parts in published BPE tokenizers, and the factor by which each lengthens a text. The limit leaves no
room for two Unicode forms in a component, because the second could undo the first."""
_SEQUENCES = ("normalizers", "pretokenizers", "processors", "decoders")


def check_tokenizer_json(data: bytes) -> None:
    """Raise `UnreadableError` for a tokenizer.json that is damaged, or beyond what tokenizers need."""
    root = _object(parsed_json(data, _unique), "JSON document")
    _check_model(_object(root.get("model"), "model"))
    added = _list(root.get("added_tokens", []), "added_tokens")
    contents = [_text(_object(token, "token in added_tokens"), "content") for token in added]
    if not all(contents) or sum(map(len, contents)) > _ADDED_LETTERS:
        raise UnreadableError(f"has an added token without content, or more than {_ADDED_LETTERS} letters of them")
    for name, kinds in _COMPONENTS.items():
        parts = list(_parts(root.get(name), name))
        growth = 1.0
        for part in parts:
            growth *= _growth(part, name, kinds)
        if len(parts) > _PARTS or growth > _GROWTH:
            raise UnreadableError(
                f"has a {name} of {len(parts)} parts that makes texts {growth:.3g} times as long, expected at most "
                f"{_PARTS} parts and {_GROWTH} times"
            )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; of two values of one name, the library might choose the other."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has two values of one name")
    return found


def _check_model(model: Mapping[str, Any]) -> None:
    if model.get("type") != "BPE":
        raise UnreadableError(f"has a model of type {format_value(model.get('type'))}, expected BPE")
    vocabulary = _object(model.get("vocab"), "vocabulary")
    ids = vocabulary.values()
    if not {type(number) for number in ids} <= {int} or not all(0 <= number < _IDS for number in ids):
        raise UnreadableError(f"has a vocabulary with ids that are not between 0 and {_IDS}")
    if len(set(ids)) != len(ids) or max(map(len, vocabulary), default=0) > _LETTERS:
        raise UnreadableError(f"gives two tokens one id, or has a token of more than {_LETTERS} letters")
    # The library cuts the prefix's length off tokens that lack the prefix. Dropout is for training.
    for name in ("continuing_subword_prefix", "dropout"):
        if model.get(name):
            raise UnreadableError(f"has the {name} {format_value(model[name])}, expected none")


def _parts(component: Any, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a component; of a Sequence each part."""
    if component is None:
        return
    part = _object(component, name)
    if part.get("type") != "Sequence":
        yield part
        return
    for key in _SEQUENCES:
        for inner in _list(part.get(key, []), name):
            yield from _parts(inner, name)


def _growth(part: Mapping[str, Any], name: str, kinds: Mapping[str, int]) -> float:
    """Return the factor by which one part of a component may lengthen a text."""
    kind = part.get("type")
    if kind == "Replace" and name in ("normalizer", "decoder"):
        content, pattern = _text(part, "content"), _pattern(part)
        return max(1.0, len(content) / len(pattern)) if pattern else 1.0 + len(content)
    if not isinstance(kind, str) or kind not in kinds:
        raise UnreadableError(f"has a {name} of type {format_value(kind)}, expected one of: {', '.join(kinds)}")
    if kind == "Split":
        _pattern(part)
    if kind == "Prepend":
        return 1.0 + len(_text(part, "prepend"))
    if name == "decoder" and kind == "Strip" and part.get("stop") != 0:
        # The library would count from the end of a token to before its beginning.
        raise UnreadableError("has a decoder that strips texts at their end")
    if kind == "TemplateProcessing":
        _check_template(part)
    return kinds[kind]


def _pattern(part: Mapping[str, Any]) -> str:
    """Return the text that a part searches; empty for a regular expression, which may match an empty text."""
    pattern = _object(part.get("pattern"), "pattern")
    if pattern.keys() == {"String"} and _text(pattern, "String"):
        return _text(pattern, "String")
    if pattern.keys() != {"Regex"} or not is_quick(_text(pattern, "Regex")):
        raise UnreadableError(f"looks for nothing, or for what could take very long: {format_value(pattern)}")
    return ""


def _check_template(part: Mapping[str, Any]) -> None:
    """Check that a template writes each text once, and only special tokens that the part lists."""
    tokens = _object(part.get("special_tokens", {}), "post_processor's special_tokens")
    for token in tokens.values():
        if len(_list(_object(token, "special token").get("ids"), "ids of a special token")) > _PARTS:
            raise UnreadableError(f"has a special token of more than {_PARTS} ids")
    for name, expected in (("single", ["A"]), ("pair", ["A", "B"])):
        pieces = [_object(piece, f"piece of '{name}'") for piece in _list(part.get(name), f"pieces of '{name}'")]
        texts, special = (
            [_text(_object(piece[kind], kind), "id") for piece in pieces if kind in piece]
            for kind in ("Sequence", "SpecialToken")
        )
        if sorted(texts) != expected or not tokens.keys() >= set(special) or len(special) > _PARTS:
            raise UnreadableError(
                f"has a post_processor whose '{name}' writes {len(texts)} texts and {len(special)} special tokens, "
                f"expected {' and '.join(expected)} once each, and at most {_PARTS} of its own special tokens"
            )


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > _LETTERS:
        raise UnreadableError(f"has '{name}' {format_value(value)}, expected a text of at most {_LETTERS} letters")
    return value


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnreadableError(f"has a {name} that is no object")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise UnreadableError(f"has {name} that are no list")
    return value
