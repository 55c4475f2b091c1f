"""The tokenizer, the chat template and the stop tokens of a checkpoint, as the runtime reads them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import chain, count, islice, product
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.files.untrusted import TEMPLATE_BYTES
from sinkprune.export.checkpoint.generation_config import GenerationSettings, read_generation_settings
from sinkprune.export.checkpoint.tokenizer import read_file, read_object, read_tokenizer

_SYLLABLES = [a + b + c for a in "bdfgklmnprstvwyz" for b in "aeiou" for c in ("", "n")]


@dataclass(frozen=True)
class Text:
    """The tokenizer, chat template, special tokens and settings of answers of a bundle."""

    tokenizer_json: str
    chat_template: str
    stop: tuple[int, ...]
    bos: str
    eos: str
    generation: GenerationSettings = field(default_factory=GenerationSettings)


def read_text(folder: Path, image_token: int, default_template: str, tokenizer_folder: Path | None = None) -> Text:
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
    generation = read_generation_settings(folder)
    stop = _stop_tokens(folder, tokenizer.eos_id if generation.eos is None else generation.eos)
    return Text(tokenizer.backend.to_str(), template, stop, tokenizer.bos, tokenizer.eos, generation)


def without_added_tokens(tokenizer_json: str) -> str:
    """Return a tokenizer.json whose tokenizer adds no special tokens around a text."""
    return json.dumps({**json.loads(tokenizer_json), "post_processor": None}, ensure_ascii=False)


def _chat_template(folder: Path) -> str | None:
    """Return the first chat template, in the order of files of transformers' processors."""
    for name in ("processor_config.json", "chat_template.json", "chat_template.jinja", "tokenizer_config.json"):
        if name.endswith(".json"):
            template: Any = read_object(folder, name).get("chat_template")
        else:
            jinja = read_file(folder, name, TEMPLATE_BYTES)
            template = None if jinja is None else jinja.replace("\r\n", "\n").replace("\r", "\n")
        if isinstance(template, list):
            named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
            template = named.get("default")
        elif isinstance(template, dict):
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
    """Return end-of-sequence ids, which may be one, a list or none, as a tuple."""
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


def small_text(vocab_size: int, specials: SpecialTokens, template: str) -> Text:
    """Return a tokenizer for random weights: bytes, then invented syllables, so that every id has a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made_up = ("Ġ" + "".join(word) for length in count(1) for word in product(_SYLLABLES, repeat=length))
    # "na" + "na" and "nan" + "a" are one word. Twice as many words as needed are enough without duplicates.
    words = iter(dict.fromkeys(islice(chain(alphabet, made_up), 2 * vocab_size)))
    vocabulary = {}
    for token in range(vocab_size):
        word = specials.texts.get(token) or next(words)
        vocabulary[word] = token
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=specials.unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if specials.bos:
        bos = specials.bos
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocabulary[bos])]
        )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in specials.texts.values()])
    return Text(tokenizer.to_str(), template, (vocabulary[specials.eos],), specials.bos, specials.eos)
