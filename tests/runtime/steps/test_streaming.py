"""Streaming: pieces add up to the answer, characters come whole, stop tokens end it unseen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from sinkprune import Pipeline
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.steps.answer import Answer
from support.models.checkpoints import IMAGE_TOKEN, Shape, as_llama, make_checkpoint, with_specials
from support.programs.slow_cases import each_once

STOP = 2
FIRST_BYTE = 3
FIRST_WORD = FIRST_BYTE + 256 + 1


def in_bytes(text: str) -> list[int]:
    """The byte-fallback tokens of `text`."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def word(number: int) -> int:
    """A token that reads as a space and ``w<number>``."""
    return FIRST_WORD + number


SCRIPTS = {
    "whole": [*in_bytes("é日🙂"), word(0), STOP, word(1), word(2), word(3)],
    "half then stop": [word(0), in_bytes("é")[0], STOP, word(1)],
    "half then word": [word(0), *in_bytes("🙂")[:2], word(1), word(2), STOP, word(3)],
    "whole, half, word": [*in_bytes("日"), in_bytes("🙂")[0], word(1), STOP, word(2)],
    "ordinary stop token": [word(0), word(1), word(9), word(2)],
    "words": [word(0), word(1), word(2), STOP, word(3)],
}
"""What the models below say. They say each token after the one before it, so none may occur twice."""


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and words, as in Llama's vocabulary: bytes are no special tokens."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": STOP}
    vocabulary |= {f"<0x{byte:02X}>": FIRST_BYTE + byte for byte in range(256)}
    vocabulary["▁"] = len(vocabulary)
    while len(vocabulary) < IMAGE_TOKEN:
        vocabulary[f"▁w{len(vocabulary) - FIRST_WORD}"] = len(vocabulary)
    vocabulary |= {"<image>": IMAGE_TOKEN, "<pad>": IMAGE_TOKEN + 1}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    return with_specials(as_llama(backend), ("<unk>", "<s>", "</s>", "<image>", "<pad>"))


def make_scripted_checkpoint(folder: Path, script: list[int]) -> Path:
    """A checkpoint that answers any prompt with `script`, over and over.

    Its blocks add nothing to the residual stream, so the head sees the last token's embedding; the head's row of each
    token is the embedding of the token it follows.
    """
    assert len(set(script)) == len(script)
    make_checkpoint(folder, Shape(image_size=112, num_layers=4))
    tokenizer = byte_fallback_tokenizer()
    tokenizer.save_pretrained(folder)
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    language_model = model.model.language_model
    last_of_prompt = tokenizer("ASSISTANT:")["input_ids"][-1]
    with torch.no_grad():
        for layer in language_model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        table = torch.nn.functional.normalize(language_model.embed_tokens.weight, dim=1)
        language_model.embed_tokens.weight.copy_(table)
        model.lm_head.weight.zero_()
        for before, token in zip([last_of_prompt, script[-1], *script], [script[0], *script], strict=False):
            model.lm_head.weight[token] += table[before]
    model.generation_config.eos_token_id = [STOP, word(9)]
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pipeline]:
    """A real pipeline over a checkpoint that says what `SCRIPTS` holds under a name."""
    made: dict[str, Pipeline] = {}

    def get(name: str) -> Pipeline:
        if name not in made:
            folder = tmp_path_factory.mktemp("scripted")
            make_scripted_checkpoint(folder / "checkpoint", SCRIPTS[name])
            request = ExportRequest(str(folder / "checkpoint"), budgets=("retain-64",))
            export_bundle(request, folder / "bundle")
            made[name] = Pipeline.load(folder / "bundle")
        return made[name]

    return get


@pytest.fixture(scope="module")
def small() -> Image.Image:
    """An image; the scripted models do not look at it."""
    return Image.new("RGB", (112, 112), (90, 120, 30))


def streamed(pipe: Pipeline, image: Image.Image, **options: object) -> tuple[list[str], Answer]:
    """The pieces `stream` yields and the answer it returns."""
    pieces: list[str] = []
    stream = pipe.stream(image, "What is this?", **options)  # type: ignore[arg-type]
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


@pytest.mark.parametrize(
    ("name", "options", "expected", "finish", "tokens"),
    [
        ("whole", {}, ["é", "日", "🙂", " w0"], "stop", 11),
        ("words", {}, ["w0", " w1", " w2"], "stop", 4),
        ("words", {"max_new_tokens": 4}, ["w0", " w1", " w2"], "stop", 4),
        ("words", {"max_new_tokens": 3}, ["w0", " w1", " w2"], "length", 3),
        ("ordinary stop token", {}, ["w0", " w1"], "stop", 3),
        # Half a character before the end is no text.
        ("half then stop", {}, ["w0"], "stop", 3),
        # Half a character that is never completed waits for the next word.
        ("half then word", {}, ["w0", "\ufffd w1", " w2"], "stop", 6),
    ],
)
def test_characters_come_whole_and_stop_tokens_are_not_shown(
    name: str,
    options: dict[str, object],
    expected: list[str],
    finish: str,
    tokens: int,
    scripted: Callable[[str], Pipeline],
    small: Image.Image,
) -> None:
    pieces, answer = streamed(scripted(name), small, **options)
    assert (pieces, answer.text, answer.finish) == (expected, "".join(expected), finish)
    assert answer.token_ids == SCRIPTS[name][:tokens]


@pytest.mark.parametrize("length", range(1, 11))
def test_an_answer_has_whole_characters_wherever_it_is_cut(
    length: int, scripted: Callable[[str], Pipeline], small: Image.Image
) -> None:
    pieces, answer = streamed(scripted("whole"), small, max_new_tokens=length)
    assert answer.finish == "length"
    assert answer.token_ids == SCRIPTS["whole"][:length]
    ends = {"é": 2, "日": 5, "🙂": 9, " w0": 10}
    assert answer.text == "".join(part for part, end in ends.items() if end <= length)
    assert "".join(pieces) == answer.text


@pytest.mark.parametrize(
    ("name", "options"), each_once(SCRIPTS, [{}, {"max_new_tokens": 4}, {"min_new_tokens": 20, "max_new_tokens": 30}])
)
def test_pieces_add_up_to_the_text_generate_returns(
    name: str, options: dict[str, int], scripted: Callable[[str], Pipeline], small: Image.Image
) -> None:
    pipe = scripted(name)
    pieces, answer = streamed(pipe, small, **options)
    heard: list[str] = []
    whole = pipe.generate(small, "What is this?", on_text=heard.append, **options)
    assert all(pieces)
    assert heard == pieces
    assert "".join(pieces) == answer.text == whole.text
    assert whole.token_ids == answer.token_ids


@pytest.mark.parametrize("least", [0, 3, 4, 8, 12])
def test_no_stop_token_is_generated_before_min_new_tokens(
    least: int, scripted: Callable[[str], Pipeline], small: Image.Image
) -> None:
    script = SCRIPTS["words"]
    _, answer = streamed(scripted("words"), small, min_new_tokens=least, max_new_tokens=12)
    assert answer.token_ids[:3] == script[:3]
    assert STOP not in answer.token_ids[:least] and len(answer.token_ids) >= least
    if least <= 3:
        assert answer.token_ids == script[: script.index(STOP) + 1]
    assert answer.finish == ("stop" if STOP in answer.token_ids else "length")
    assert "</s>" not in answer.text
