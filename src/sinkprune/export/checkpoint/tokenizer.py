"""A checkpoint's tokenizer: tokenizer.json, and the tokens that transformers adds from the other files.

transformers' own loader could run code from the folder, so it is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.files.untrusted import TOKENIZER_BYTES
from sinkprune.export.checkpoint.folder import has_entry, read_json, read_text

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_ADDED = 10_000
_LETTERS = 1000


@dataclass(frozen=True)
class CheckpointTokenizer:
    """A tokenizer as transformers loads it, with its special tokens `bos` and `eos`, empty if it has none."""

    backend: Tokenizer
    bos: str
    eos: str

    @property
    def eos_id(self) -> int | None:
        """The id of `eos`."""
        return self.backend.token_to_id(self.eos)


def read_tokenizer(folder: Path) -> CheckpointTokenizer:
    """Return the tokenizer of a checkpoint, with the ids of transformers' `AutoTokenizer`.

    tokenizer.json has nearly all tokens. transformers adds the tokens that tokenizer_config.json lists, in the order
    of their ids, and its special tokens. If it lists none, transformers adds those of special_tokens_map.json and
    added_tokens.json. Raises `CheckpointError`.
    """
    backend = _backend(folder)
    config = read_object(folder, "tokenizer_config.json")
    listed = config.get("added_tokens_decoder")
    where = f"'{folder / 'tokenizer_config.json'}'"
    if listed is None:
        former = read_object(folder, "special_tokens_map.json")
        special = [*_list_of(config), *_list_of({**former, "additional_special_tokens": None})]
        config = {**config, **former}
        special += [config.get(name) for name in _NAMED]
        added = _former_added_tokens(folder, {_content(token) for token in special})
        added |= backend.get_added_tokens_decoder()
    elif isinstance(listed, dict) and all(isinstance(token, dict) for token in listed.values()):
        added = {_id(where, number): _token(where, token, special=False) for number, token in listed.items()}
    else:
        raise _malformed(where, "added_tokens_decoder", listed)
    named = {name: _named(where, name, config.get(name)) for name in _NAMED}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    tokens = [added[number] for number in sorted(added)]
    known |= {token.content for token in tokens}
    for token in (*named.values(), *_extra(where, config)):
        if token is not None and token.content not in known:
            known.add(token.content)
            tokens.append(token)
    contents = {token.content for token in named.values() if token is not None}
    if len(tokens) > _ADDED:
        raise CheckpointError(f"{where} adds {len(tokens)} tokens, expected at most {_ADDED}. Download it again.")
    for token in tokens:
        token.special = token.special or token.content in contents
    backend.add_tokens(tokens)
    bos, eos = named["bos_token"], named["eos_token"]
    return CheckpointTokenizer(backend, bos.content if bos else "", eos.content if eos else "")


def _backend(folder: Path) -> Tokenizer:
    name = "tokenizer.json"
    text = read_file(folder, name, TOKENIZER_BYTES)
    if text is None:
        raise CheckpointError(
            f"checkpoint '{folder}' has no {name}. Where it has another kind of tokenizer, such as tokenizer.model, "
            "make one of it, on a machine you can do without if you do not trust the checkpoint: "
            f"transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    try:
        backend = Tokenizer.from_str(text)
    except BaseException as error:
        # The tokenizers library raises many kinds of errors, panics among them.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        found = " ".join(str(error).split())[:200]
        raise CheckpointError(f"'{folder / name}' is no valid tokenizer: {found}. Download it again.") from error
    # The runtime decodes answers byte by byte, and dropout is for training.
    if not isinstance(backend.model, BPE) or backend.model.dropout:
        raise CheckpointError(
            f"'{folder / name}' has a model of type {type(backend.model).__name__}, expected BPE without dropout. "
            "Use a checkpoint whose tokenizer is BPE."
        )
    return backend


def _former_added_tokens(folder: Path, special: Set[str]) -> dict[int, AddedToken]:
    """Return the tokens of added_tokens.json, for checkpoints whose tokenizer_config.json lists none."""
    name = "added_tokens.json"
    found = {}
    for content, number in read_object(folder, name).items():
        where = f"'{folder / name}'"
        token = {"content": content, "normalized": content not in special}
        found[_id(where, number)] = _token(where, token, special=content in special)
    return found


def _extra(where: str, config: Mapping[str, Any]) -> list[AddedToken]:
    """Return the special tokens of other roles, and those without a role."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if not isinstance(extra, (list, dict)):
        raise _malformed(where, "extra_special_tokens", extra)
    values = [value for key, value in config.items() if key.endswith("_token") and key not in _NAMED]
    values += extra.values() if isinstance(extra, dict) else extra
    return [_token(where, {"content": _content(value)}, special=True) for value in values if _content(value)]


def _list_of(config: Mapping[str, Any]) -> list[Any]:
    """Return the special tokens without a role; none if they have names."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    return extra if isinstance(extra, list) else []


def _named(where: str, name: str, value: Any) -> AddedToken | None:
    if value is None:
        return None
    if not isinstance(value, (str, dict)) or not _content(value):
        raise _malformed(where, name, value)
    return _token(where, value if isinstance(value, dict) else {"content": value}, special=True)


def _content(value: Any) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _token(where: str, fields: Mapping[str, Any], *, special: bool) -> AddedToken:
    content = fields.get("content")
    if not isinstance(content, str) or not 0 < len(content) <= _LETTERS:
        raise _malformed(where, "an added token", content)
    flags = {name: fields[name] for name in _FLAGS if name in fields}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise _malformed(where, "an added token", fields)
    return AddedToken(content, **{"special": special, **flags})


def _id(where: str, number: Any) -> int:
    digits = str(number)
    if isinstance(number, bool) or not digits.isascii() or not digits.isdigit() or len(digits) > 9:
        raise _malformed(where, "the id of a token", number)
    return int(digits)


def _malformed(where: str, what: str, found: Any) -> CheckpointError:
    return CheckpointError(f"{where}: {what} is malformed: {str(found)[:100]!r}. Download it again.")


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in the file `name` of a checkpoint, empty if there is no such file.

    Raises `CheckpointError`.
    """
    return read_json(folder, name) if has_entry(folder, name) else {}


def read_file(folder: Path, name: str, limit: int) -> str | None:
    """Return the text in the file `name` of a checkpoint, or None if there is no such file.

    Raises `CheckpointError` if it is no regular file, has more than `limit` bytes or is not UTF-8.
    """
    return read_text(folder, name, limit) if has_entry(folder, name) else None
