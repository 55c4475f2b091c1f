"""Token ids to text, piece by piece, against decoding them whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkprune.runtime.text.answer_text import Detokenizer
from support.references.prompt_encoders import TOKENIZERS

TEXTS = st.text(st.sampled_from("aé日🙂 \n.!?\u00a0ß"), max_size=12)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
def test_pieces_of_a_text_add_up_to_it(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    answer = Detokenizer(tokenizer)
    pieces = [answer.add(token) for token in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    pieces.append(answer.end())
    assert "".join(pieces) == answer.text == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["llama", "byte-level"])
@given(data=st.data())
def test_any_tokens_at_all_are_text_in_the_end(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]()
    known = sorted(token for token in tokenizer.get_vocab().values())
    ids = data.draw(st.lists(st.sampled_from(known), max_size=20))
    answer = Detokenizer(tokenizer)
    pieces = [*map(answer.add, ids), answer.end()]
    assert "".join(pieces) == answer.text
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    # Half a character may change how what was shown before it would read.
    assert answer.text.replace("\ufffd", "") == whole.replace("\ufffd", "") or "\ufffd" in whole
