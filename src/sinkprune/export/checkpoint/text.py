"""What a checkpoint says about texts: tokenizer, chat template and generation.

transformers' own loader could run code from the folder, so it is not used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from sinkprune.contract.checks import fits, format_value
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.files.untrusted import TEMPLATE_BYTES, TOKENIZER_BYTES
from sinkprune.contract.manifest import RepetitionPenalty
from sinkprune.export.checkpoint.folder import has_entry, read_json, read_text

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_ADDED = 10_000
_LETTERS = 1000

_FILE, _CONFIG = "generation_config.json", "config.json"
_REJECTED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "guidance_scale"), (1,)),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("penalty_alpha", "diversity_penalty"), (0,)),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "stop_strings"), ([],)),
    **dict.fromkeys(("sequence_bias", "force_words_ids", "constraints"), ([], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("watermarking_config", "dola_layers", "max_time"), ()),
    "encoder_repetition_penalty": (1,),
    "token_healing": (False,),
}
"""Settings that change greedy answers too, with the values at which they do not. null changes nothing."""
_LEFT_OUT: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (False,),
    "temperature": (1,),
    "top_k": (50,),
    "top_p": (1,),
    "typical_p": (1,),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("min_p", "top_h", "max_new_tokens"), ()),
    "max_length": (20,),
}
"""Settings of sampled answers and of lengths, which are a request's own, with transformers' defaults."""
_OF_NO_ANSWER = {
    *("_from_model_config", "transformers_version", "_commit_hash", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("decoder_start_token_id", "repetition_penalty", "early_stopping", "length_penalty", "remove_invalid_values"),
    *("renormalize_logits", "low_memory", "use_cache", "return_dict_in_generate", "prompt_lookup_num_tokens"),
    *("max_matching_ngram_size", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("target_lookbehind", "speculation_type", "use_mtp", "compile_config", "disable_compile", "prefill_chunk_size"),
    *("continuous_batching_config", "max_cache_len"),
}
"""Settings that change no answer here, or that are read: of beams, of speed, of outputs."""
_PREFIXES = ("output_", "cache_", "assistant_")


@dataclass(frozen=True)
class CheckpointTokenizer:
    """A tokenizer as transformers loads it, with its special tokens `bos` and `eos`, empty if it has none."""

    backend: Tokenizer
    bos: str
    eos: str
    eos_id: int | None


def read_tokenizer(folder: Path) -> CheckpointTokenizer:
    """Return the tokenizer of a checkpoint, with the ids of transformers' `AutoTokenizer`.

    tokenizer.json has nearly all tokens. transformers adds the tokens that tokenizer_config.json lists, in the order
    of their ids, and its special tokens. If it lists none, transformers adds those of special_tokens_map.json and
    added_tokens.json. Raises `CheckpointError`.
    """
    backend = _backend(folder)
    config = _read_object(folder, "tokenizer_config.json")
    listed = config.get("added_tokens_decoder")
    where = f"'{folder / 'tokenizer_config.json'}'"
    if listed is None:
        former = _read_object(folder, "special_tokens_map.json")
        extra = _without_role(config), former.get("extra_special_tokens")
        special = [token for one in extra if isinstance(one, list) for token in one]
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
    stop = eos.content if eos else ""
    return CheckpointTokenizer(backend, bos.content if bos else "", stop, backend.token_to_id(stop))


def _backend(folder: Path) -> Tokenizer:
    name = "tokenizer.json"
    text = _read_file(folder, name, TOKENIZER_BYTES)
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
    ids = backend.get_vocab(with_added_tokens=False).values()
    if len(set(ids)) < len(ids):
        # The library takes it, and panics where it decodes an answer.
        raise CheckpointError(
            f"'{folder / name}' gives several tokens the same id, expected one token an id. Download it again."
        )
    return backend


def _former_added_tokens(folder: Path, special: Set[str]) -> dict[int, AddedToken]:
    """Return the tokens of added_tokens.json, for checkpoints whose tokenizer_config.json lists none."""
    name = "added_tokens.json"
    found = {}
    for content, number in _read_object(folder, name).items():
        where = f"'{folder / name}'"
        token = {"content": content, "normalized": content not in special}
        found[_id(where, number)] = _token(where, token, special=content in special)
    return found


def _extra(where: str, config: Mapping[str, Any]) -> list[AddedToken]:
    """Return the special tokens of other roles, and those without a role."""
    extra = _without_role(config) or []
    if not isinstance(extra, (list, dict)):
        raise _malformed(where, "extra_special_tokens", extra)
    values = [value for key, value in config.items() if key.endswith("_token") and key not in _NAMED]
    values += extra.values() if isinstance(extra, dict) else extra
    return [_token(where, {"content": _content(value)}, special=True) for value in values if _content(value)]


def _without_role(config: Mapping[str, Any]) -> Any:
    return config.get("extra_special_tokens") or config.get("additional_special_tokens")


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


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in the file `name` of a checkpoint, empty if there is no such file."""
    return read_json(folder, name) if has_entry(folder, name) else {}


def _read_file(folder: Path, name: str, limit: int) -> str | None:
    return read_text(folder, name, limit) if has_entry(folder, name) else None


def _generation_settings(folder: Path) -> tuple[Any, float | None, dict[str, Any]]:
    """Return the settings of a checkpoint's generation_config.json, or else of config.json, as transformers does.

    They are the ids of end-of-sequence tokens, the `repetition_penalty`, and settings that a bundle does not apply.
    Raises `CheckpointError` for settings that change greedy answers and that bundles cannot apply.
    """
    name, given = _FILE, _read_object(folder, _FILE)
    if not given:
        name, config = _CONFIG, _read_object(folder, _CONFIG)
        text = config.get("text_config")
        merged = {**(text if isinstance(text, dict) else {}), **_without_null(config)}
        known = {*_REJECTED, *_LEFT_OUT, "repetition_penalty", "eos_token_id"}
        given = {key: value for key, value in merged.items() if key in known}
    given = _without_null(given)
    rejected = [key for key, neutral in _REJECTED.items() if key in given and given[key] not in neutral]
    if rejected:
        raise CheckpointError(
            f"'{folder / name}' has {', '.join(f'{key} {format_value(given[key])}' for key in rejected)}, which "
            f"{'changes' if len(rejected) == 1 else 'change'} answers, and bundles do not apply it. Remove it from "
            "the file to export without."
        )
    penalty = given.get("repetition_penalty")
    if penalty is not None and not fits(RepetitionPenalty, penalty):
        raise CheckpointError(
            f"'{folder / name}' has the repetition_penalty {format_value(penalty)}, expected a number from 0.01 to "
            "100. Correct it, or remove it."
        )
    left_out = {
        key: value
        for key, value in given.items()
        if key not in _REJECTED
        and key not in _OF_NO_ANSWER
        and not key.startswith(_PREFIXES)
        and value not in _LEFT_OUT.get(key, ())
    }
    own = None if penalty is None or penalty == 1 else float(penalty)
    return given.get("eos_token_id"), own, left_out


def _without_null(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


@dataclass(frozen=True)
class Text:
    """The tokenizer, chat template, special tokens and settings of answers of a bundle."""

    tokenizer_json: str
    chat_template: str
    stop: tuple[int, ...]
    bos: str
    eos: str
    repetition_penalty: float | None = None
    left_out: dict[str, Any] = field(default_factory=dict)
    """Settings of generation that a bundle does not apply, because they are a request's own, or unknown."""


def read_checkpoint_text(
    folder: Path, image_token: int, default_template: str, tokenizer_folder: Path | None = None
) -> Text:
    """Return tokenizer, chat template and stop tokens of `folder`. The template defaults to `default_template`.

    With `tokenizer_folder`, the tokenizer is the one there.

    Raises `CheckpointError` for damaged files, and for a checkpoint without tokenizer.json.
    """
    tokenizer = read_tokenizer(tokenizer_folder or folder)
    if image_token not in tokenizer.backend.get_added_tokens_decoder():
        raise CheckpointError(
            f"checkpoint '{tokenizer_folder or folder}': its tokenizer has no added token {image_token}, which "
            "config.json gives as the image token. Add it to the tokenizer, or download both again."
        )
    template = _chat_template(folder) or default_template
    eos, penalty, left_out = _generation_settings(folder)
    stop = _stop_tokens(folder, tokenizer.eos_id if eos is None else eos)
    return Text(tokenizer.backend.to_str(), template, stop, tokenizer.bos, tokenizer.eos, penalty, left_out)


def without_added_tokens(tokenizer_json: str) -> str:
    """Return a tokenizer.json whose tokenizer adds no special tokens around a text."""
    return json.dumps({**json.loads(tokenizer_json), "post_processor": None}, ensure_ascii=False)


def _chat_template(folder: Path) -> str | None:
    """Return the first chat template, in the order of files of transformers' processors."""
    for name in ("processor_config.json", "chat_template.json", "chat_template.jinja", "tokenizer_config.json"):
        if name.endswith(".json"):
            template: Any = _read_object(folder, name).get("chat_template")
        else:
            jinja = _read_file(folder, name, TEMPLATE_BYTES)
            template = None if jinja is None else jinja.replace("\r\n", "\n").replace("\r", "\n")
        if isinstance(template, list):
            template = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        if isinstance(template, dict):
            template = template.get("default")
        if isinstance(template, str):
            if len(template.encode()) > TEMPLATE_BYTES:
                raise CheckpointError(
                    f"'{folder / name}' has a chat template of {len(template.encode())} bytes, expected at most "
                    f"{TEMPLATE_BYTES}. Shorten it."
                )
            return template
    return None


def _stop_tokens(folder: Path, stop: Any) -> tuple[int, ...]:
    ids = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise CheckpointError(
            f"'{folder / 'generation_config.json'}' has the eos_token_id {str(stop)[:100]}, expected a token id or a "
            "list of them. Download it again."
        )
    return tuple(ids)


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a family, for the tokenizer of random weights."""

    texts: dict[int, str]
    """The tokens by id. One of them may be the first id after the vocabulary."""
    bos: str
    """The token before every prompt; empty if there is none."""
    eos: str
    """The token that ends an answer."""
    unknown: str | None = None
