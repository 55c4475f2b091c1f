"""Tokenizers of every kind, under our encoder and under transformers'; encoders whose answers start differently."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sinkprune.contract.manifest import Tokens
from sinkprune.export.checkpoint.presets import small_text
from sinkprune.export.checkpoint.text import SpecialTokens
from sinkprune.runtime.text.answer_tokens import AnswerText, Sampler
from sinkprune.runtime.text.prompt import PromptEncoder
from support.models.checkpoints import (
    IMAGE_TOKEN,
    TEMPLATE,
    VOCAB,
    add_specials,
    as_llama,
    byte_pairs,
    byte_tokens,
    tokenizer,
)
from support.models.qwen_checkpoints import qwen_tokenizer
from support.programs.repository import ROOT

VOCABULARY = 700
"""The logits of random answers: more than the tokenizers have tokens."""
SPECIALS = {"<unk>": 0, "<s>": 1, "</s>": 2, "<image>": IMAGE_TOKEN, "<pad>": IMAGE_TOKEN + 1}


def metaspace() -> Tokenizer:
    """As newer Llama and Mistral tokenizers are made: a Metaspace pre-tokenizer, prefix on the first word only."""
    backend = byte_fallback()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def llama() -> Tokenizer:
    """As older Llama tokenizers are made: a normalizer that puts a prefix before every piece."""
    return as_llama(byte_fallback())


def byte_fallback() -> Tokenizer:
    """Letters, a few merges, bytes for the rest, and the special tokens of `SPECIALS`."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **byte_tokens(3)}
    letters = "▁abcdefghijklmnopqrstuvwxyz.,?:\n"
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "s"), ("▁", "is"), ("i", "m"), ("im", "a"), ("▁", "▁")]
    for token in [*letters, *(a + b for a, b in merges)]:
        vocabulary[token] = len(vocabulary)
    while len(vocabulary) < IMAGE_TOKEN:
        vocabulary[f"▁filler{len(vocabulary)}"] = len(vocabulary)
    vocabulary["<image>"], vocabulary["<pad>"] = IMAGE_TOKEN, IMAGE_TOKEN + 1
    backend = byte_pairs(vocabulary, merges)
    add_specials(backend, SPECIALS, "<s>")
    return backend


def byte_level() -> Tokenizer:
    """As GPT-2, Qwen and random-weights bundles have them."""
    texts = {0: "<unk>", 1: "<s>", 2: "</s>", IMAGE_TOKEN: "<image>"}
    specials = SpecialTokens(texts, bos="<s>", eos="</s>", unknown="<unk>")
    backend = Tokenizer.from_str(small_text(VOCAB, specials, TEMPLATE).tokenizer_json)
    backend.add_special_tokens([AddedToken("<pad>", special=True)])
    return backend


def stripping() -> Tokenizer:
    """Special tokens that swallow the blanks around them, as Phi's and RoBERTa's do."""
    backend = byte_fallback()
    text = backend.to_str().replace('"lstrip":false,"rstrip":false', '"lstrip":true,"rstrip":true')
    stripped = Tokenizer.from_str(text)
    assert all(token.rstrip for token in stripped.get_added_tokens_decoder().values())
    stripped.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return stripped


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "trained llama": lambda: tokenizer().backend_tokenizer,
    "llama": llama,
    "metaspace": metaspace,
    "byte-level": byte_level,
    "stripping": stripping,
}


@dataclass(frozen=True)
class Both:
    """Our encoder and transformers' tokenizer over the same files."""

    ours: PromptEncoder
    theirs: PreTrainedTokenizerFast
    template: str

    def expected(self, text: str, *, bos: bool = True) -> list[int]:
        """transformers' ids of the rendered conversation."""
        content = [{"type": "image"}, {"type": "text", "text": text}]
        rendered = self.theirs.apply_chat_template(
            [{"role": "user", "content": content}],
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=True,
        )
        return self.theirs(rendered, add_special_tokens=bos)["input_ids"]

    def found(self, text: str) -> list[int]:
        """Our ids, the image token put back between the halves."""
        prompt = self.ours.encode(["", text])
        return [*prompt.texts[0], IMAGE_TOKEN, *prompt.texts[-1]]


def encoder(folder: Path, template: str) -> PromptEncoder:
    """An encoder of the tokenizer in `folder` with `template`."""
    return PromptEncoder(
        (folder / "tokenizer.json").read_bytes(), template.encode(), Tokens(IMAGE_TOKEN, (2,), "<s>", "</s>")
    )


class Pairs:
    """Both encoders, by the tokenizer's name and the template, made once in a folder each."""

    def __init__(self, new_folder: Callable[[], Path]) -> None:
        self._new_folder = new_folder
        self._made: dict[tuple[str, str], Both] = {}

    def __call__(self, name: str, template: str = TEMPLATE) -> Both:
        if (name, template) not in self._made:
            backend, folder = TOKENIZERS[name](), self._new_folder()
            backend.save(str(folder / "tokenizer.json"))
            roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
            theirs = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **roles)
            self._made[name, template] = Both(encoder(folder, template), theirs, template)
        return self._made[name, template]


def assert_typed_text_stays_text(pair: Both, text: str) -> None:
    """`text` gives no special token, and can be read back."""
    prompt = pair.ours.encode(["", text])
    bos = pair.ours.tokenizer.token_to_id("<s>")
    assert prompt.texts[0].count(bos) == 1
    special = set(SPECIALS.values())
    assert not special & {*prompt.texts[0][1:], *prompt.texts[-1]}
    decoded = pair.ours.tokenizer.decode(prompt.texts[-1], skip_special_tokens=False)
    assert decoded.replace("▁", " ").strip() == f"{text} ASSISTANT:".strip()


POCKET = ROOT / "src/sinkprune/demo/pocket"
_TEMPLATE = b"{{ messages[0]['content'] }}"
STOP = {"pocket": (2,), "qwen": (372, 370), "llama": (2,)}
"""The stop tokens, by the name of the kind."""


def answer_encoder(kind: str) -> PromptEncoder:
    """The encoder of one kind.

    The decoder of `pocket` takes a space from the start that the encoder does not add. `llama` does both, and has
    byte tokens for all but a few words. `qwen` does neither.
    """
    if kind == "pocket":
        return PromptEncoder((POCKET / "tokenizer.json").read_bytes(), _TEMPLATE, Tokens(3, STOP[kind], "", "</s>"))
    if kind == "qwen":
        backend = qwen_tokenizer().backend_tokenizer
        names = {token.content: number for number, token in backend.get_added_tokens_decoder().items()}
        image = names["<|image_pad|>"]
        return PromptEncoder(backend.to_str().encode(), _TEMPLATE, Tokens(image, STOP[kind], "", "<|im_end|>"))
    return PromptEncoder(_llama().to_str().encode(), _TEMPLATE, Tokens(3, STOP[kind], "<s>", "</s>"))


def _llama() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", "<image>", *byte_tokens()]
    pieces += ["▁", *map(chr, range(33, 127)), "re", "d", "▁re", "▁red", "red", '"▁', "▁{", "▁▁"]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("r", "e"), ("▁", "re"), ("▁re", "d"), ("re", "d"), ('"', "▁"), ("▁", "{"), ("▁", "▁")]
    backend = as_llama(byte_pairs(vocabulary, merges))
    add_specials(backend, pieces[:4])
    return backend


def random_answer(
    encoder: PromptEncoder,
    stop: Sequence[int],
    constraint: Any,
    sampler: Sampler,
    seed: int | None,
    most: int,
    wanted: Iterable[int] = (),
) -> tuple[str, list[int], bool]:
    """Return the text of random logits that favour the tokens `wanted`, its tokens, and whether it ended."""
    tokenizer, generator = encoder.tokenizer, np.random.default_rng(seed)
    text, ids, favoured = AnswerText(tokenizer, stop), list[int](), [*wanted]
    # Tokens that end something are likelier, so that answers end.
    ends = [one for one in range(tokenizer.get_vocab_size()) if re.search('["}\\]]', tokenizer.id_to_token(one))]
    while not text.stopped and not constraint.complete and len(ids) < most:
        logits = generator.normal(size=VOCABULARY) * 3
        logits[[*ends, *stop]] += 4
        if favoured:
            logits[favoured.pop(0)] += 100
        ids.append(sampler(logits, constraint.allowed(VOCABULARY)))
        constraint.accept(ids[-1])
        text.add(ids[-1])
    text.end()
    return text.text, ids, text.stopped or constraint.complete
