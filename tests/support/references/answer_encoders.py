"""Encoders with tokenizers of each kind, in which what starts an answer differs; and answers of random logits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, models

from sinkprune.contract.manifest import Tokens
from sinkprune.runtime.text.answer_tokens import AnswerText, Sampler
from sinkprune.runtime.text.prompt import PromptEncoder
from support.models.checkpoints import as_llama
from support.models.qwen_checkpoints import qwen_tokenizer
from support.programs.repository import ROOT

POCKET = ROOT / "src/sinkprune/demo/pocket"
_TEMPLATE = b"{{ messages[0]['content'] }}"
STOP = {"pocket": (2,), "qwen": (372, 370), "llama": (2,)}
"""The stop tokens, by the name of the kind."""
VOCABULARY = 700
"""Larger than the tokenizers'."""


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


def _llama() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", "<image>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *map(chr, range(33, 127)), "re", "d", "▁re", "▁red", "red", '"▁', "▁{", "▁▁"]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("r", "e"), ("▁", "re"), ("▁re", "d"), ("re", "d"), ('"', "▁"), ("▁", "{"), ("▁", "▁")]
    backend = as_llama(
        Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    )
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in pieces[:4]])
    return Tokenizer.from_str(json.dumps(json.loads(backend.to_str())))
