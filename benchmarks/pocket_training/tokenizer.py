"""The tokenizer of the pocket models: byte-level BPE, trained on their own texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 768
"""Tokens of a pocket model that answers, special ones included."""


def train_tokenizer(
    texts: Iterable[str], special: Sequence[str], unknown: str | None = None, vocabulary: int = VOCABULARY
) -> Tokenizer:
    """Return a byte-level BPE tokenizer of up to `vocabulary` tokens, trained on `texts`.

    `special` are the first tokens, in this order. `unknown` is the one for unknown text, if the model has one. A
    decoded text does not begin with a space.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer
