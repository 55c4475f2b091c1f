"""Token ids to text, piece by piece, against decoding them whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkprune.runtime.text.answer_tokens import AnswerText, TokenBytes
from support.references.prompt_encoders import TOKENIZERS

TEXTS = st.text(st.sampled_from("aé日🙂 \n.!?\u00a0ß\ufffd"), max_size=12)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
def test_pieces_of_a_text_add_up_to_it_and_a_cut_text_begins_it(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    answer, whole = AnswerText(tokenizer), tokenizer.decode(ids)
    pieces = []
    for token in ids:
        pieces.append(answer.add(token))
        assert whole.startswith(answer.text)
    assert "".join(pieces) == answer.text == whole


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_bytes_of_any_tokens_join_to_the_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = data.draw(st.lists(st.sampled_from(sorted(tokenizer.get_vocab().values())), max_size=20))
    answer, tokens = AnswerText(tokenizer), TokenBytes(tokenizer)
    pieces = [*map(answer.add, ids)]
    joined = b"".join(map(tokens.add, ids))
    assert "".join(pieces) == answer.text
    # Only a last character may be incomplete.
    assert joined.decode(errors="replace") in (answer.text, answer.text + "\ufffd")
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    # With byte fallback, the library also replaces the characters next to half a character.
    if name == "byte-level" or "\ufffd" not in whole:
        assert joined.decode(errors="replace") == whole


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_and_unknown_tokens_write_no_bytes(name: str) -> None:
    tokens = TokenBytes(TOKENIZERS[name]())
    assert [tokens.add(token) for token in (1, 2, 10**6)] == [b"", b"", b""]
