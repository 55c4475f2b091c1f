"""A checkpoint's tokenizer is what transformers makes of its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, ProcessorMixin

from sinkprune.contract.errors import CheckpointError
from sinkprune.export.checkpoint.text import read_checkpoint_text, read_tokenizer
from support.models.qwen_checkpoints import qwen_tokenizer
from support.references.prompt_encoders import byte_level, llama, metaspace, stripping

TEXTS = [
    "What is in <image> the picture?",
    "<s>[INST] hi [/INST]</s><pad> x",
    "  a  b\n<|im_start|>user\n<|endoftext|>",
    "<image><extra>foo<more> bar </s> é 🙂",
]
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def token(content: str, **flags: bool) -> dict[str, Any]:
    """An added token, as tokenizer_config.json writes it."""
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content, **plain, **flags}


LISTED = {"0": token("<unk>"), "1": token("<s>"), "2": token("</s>"), "380": token("<image>"), "381": token("<pad>")}
MORE = {**LISTED, "382": token("<extra>"), "383": token("<more>", special=False, normalized=True)}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "named only": NAMED,
    "llama": {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True, **NAMED},
    "listed": {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": LISTED, **NAMED},
    "more are listed": {"tokenizer_class": "LlamaTokenizerFast", "added_tokens_decoder": MORE, **NAMED},
    "named, not special": {"added_tokens_decoder": {**LISTED, "1": token("<s>", special=False)}, **NAMED},
    "new roles": {**NAMED, "pad_token": "<new>", "mask_token": "<extra>", "image_token": "<image>"},
    "additional": {"added_tokens_decoder": LISTED, "additional_special_tokens": ["<extra>", "<more>"], **NAMED},
    "extra": {"extra_special_tokens": ["<extra>", "<image>"], "y_token": "<more>", **NAMED},
}


def written(folder: Path, backend: Tokenizer, kind: str, config: object, **others: object) -> Path:
    """A checkpoint's tokenizer files in `folder`; `others` by their names without .json."""
    backend.save(str(folder / "tokenizer.json"))
    files = {"config": {"model_type": kind, "transformers_version": "4.40.0"}, "tokenizer_config": config, **others}
    for name, content in files.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def cut_and_padded() -> Tokenizer:
    """A tokenizer whose file has a length of its own, which prompts do not have."""
    backend = llama()
    backend.enable_truncation(5)
    backend.enable_padding(length=40)
    return backend


def assert_equal_to_transformers(folder: Path) -> None:
    ours, theirs = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    ours.backend.no_truncation()
    ours.backend.no_padding()
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.backend.encode(text).ids == ids
        assert ours.backend.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert (ours.bos, ours.eos) == (theirs.bos_token or "", theirs.eos_token or "")
    assert ours.eos_id == theirs.eos_token_id
    added = ours.backend.get_added_tokens_decoder()
    assert {number: repr(one) for number, one in added.items()} == {
        number: repr(one) for number, one in theirs.added_tokens_decoder.items()
    }


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        *((llama, config) for config in CONFIGS),
        *((backend, "more are listed") for backend in (metaspace, byte_level, stripping, cut_and_padded)),
    ],
)
def test_tokenizers_of_every_kind_are_those_of_transformers(backend: Any, config: str, tmp_path: Path) -> None:
    assert_equal_to_transformers(written(tmp_path, backend(), "llava_next", CONFIGS[config]))


def test_special_tokens_may_lie_in_files_of_their_own(tmp_path: Path) -> None:
    special = {"bos_token": token("<s>"), "eos_token": "</s>", "additional_special_tokens": ["<extra>"]}
    added = {"<image>": 380, "<extra>": 382, "<more>": 383}
    assert_equal_to_transformers(
        written(tmp_path, llama(), "llava", {}, special_tokens_map=special, added_tokens=added)
    )


@pytest.mark.parametrize(
    ("kind", "name", "lists"), [("qwen2_vl", "Qwen2TokenizerFast", True), ("qwen2_5_vl", None, False)]
)
def test_qwens_tokenizers_are_those_of_transformers(kind: str, name: str | None, lists: bool, tmp_path: Path) -> None:
    backend = qwen_tokenizer().backend_tokenizer
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, False, False)])
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    added = backend.get_added_tokens_decoder().items()
    listed = {str(number): token(one.content, special=one.special) for number, one in added}
    config = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "bos_token": None,
        "add_bos_token": False,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        **({"tokenizer_class": name} if name else {}),
        **({"added_tokens_decoder": listed} if lists else {}),
    }
    assert_equal_to_transformers(written(tmp_path, backend, kind, config))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path, llama(), "llava", NAMED)


def test_the_error_for_a_missing_tokenizer_json_shows_how_to_make_it(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*tokenizer\.model.*save_pretrained"):
        read_tokenizer(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", b"\xff", "not UTF-8"),
        ("tokenizer.json", b"[" * 5000, "is no valid tokenizer"),
        ("tokenizer.json", b'{"model": {"type": "WordLevel", "vocab": {}, "unk_token": "a"}}', "expected BPE"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {}, "merges": [], "dropout": 0.5}}', "BPE without"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": 1, "b": 1}, "merges": []}}', "the same id"),
        ("tokenizer_config.json", b"[]", "expected a JSON object"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "y"}}}', "id of a token is malformed"),
        ("tokenizer_config.json", b'{"bos_token": 5}', "bos_token is malformed"),
        ("added_tokens.json", b'{"x": -1}', "id of a token is malformed"),
        ("generation_config.json", b'{"eos_token_id": "x"}', "eos_token_id x"),
        ("chat_template.jinja", b"{{ x }}\xff", "not UTF-8"),
    ],
)
def test_a_damaged_file_is_rejected_by_its_name(file: str, content: bytes, message: str, folder: Path) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint_text(folder, 380, "default")
    assert str(folder / file) in str(caught.value)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ([{"name": "tool_use", "template": "no"}, {"name": "default", "template": "one"}], "one"),
        ([{"name": "rag", "template": "no"}, 5], "by default"),
    ],
)
def test_of_several_templates_the_default_is_taken(template: object, expected: str, folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({**NAMED, "chat_template": template}), encoding="utf-8")
    assert read_checkpoint_text(folder, 380, "by default").chat_template == expected


def test_of_several_files_the_template_of_transformers_processors_is_taken(folder: Path) -> None:
    assert read_checkpoint_text(folder, 380, "by default").chat_template == "by default"
    texts = dict.fromkeys(("tokenizer_config", "chat_template", "processor_config"))
    for name in texts:
        template = {"chat_template": f"of {name}"}
        (folder / f"{name}.json").write_text(json.dumps({**NAMED, **template} if "token" in name else template))
        (folder / "chat_template.jinja").write_bytes(b"of\r\njinja")
        texts[name] = read_checkpoint_text(folder, 380, "by default").chat_template
        assert texts[name] == ProcessorMixin.get_processor_dict(folder)[0]["chat_template"]
    assert [*texts.values()] == ["of\njinja", "of chat_template", "of processor_config"]


APPLIED: dict[str, Any] = {"_from_model_config": True, "transformers_version": "5.0.0", "eos_token_id": [2, 7]}


@pytest.mark.parametrize(
    ("settings", "penalty", "left_out"),
    [
        # Those of Qwen2.5-VL, Qwen3-VL and Vicuna, as they are published.
        ({"do_sample": True, "repetition_penalty": 1.05, "temperature": 1e-6}, 1.05, ("do_sample", "temperature")),
        (
            {"do_sample": True, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.0, "temperature": 0.7},
            None,
            ("do_sample", "top_k", "top_p", "temperature"),
        ),
        # What changes nothing, and what nobody knows.
        ({"num_beams": 1, "top_k": 50, "top_p": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None}, None, ()),
        ({"use_cache": True, "output_scores": False, "pad_token_id": 0, "cache_implementation": "static"}, None, ()),
        ({"chat_format": "chatml", "repetition_penalty": 2}, 2.0, ("chat_format",)),
    ],
)
def test_generation_settings_are_applied_or_listed(
    settings: dict[str, Any], penalty: float | None, left_out: tuple[str, ...], folder: Path
) -> None:
    (folder / "generation_config.json").write_text(json.dumps({**APPLIED, **settings}), encoding="utf-8")
    text = read_checkpoint_text(folder, 380, "default")
    assert (text.stop, text.repetition_penalty) == ((2, 7), penalty)
    assert text.left_out == {name: settings[name] for name in left_out}


def test_without_generation_config_json_the_settings_are_those_of_config_json(folder: Path) -> None:
    settings = {"text_config": {"repetition_penalty": 1.2, "eos_token_id": 5}, "eos_token_id": [2, 7]}
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps({**settings, "model_type": "llava"}), encoding="utf-8")
    text = read_checkpoint_text(folder, 380, "default")
    assert (text.stop, text.repetition_penalty, text.left_out) == ((2, 7), 1.2, {})
    (folder / "generation_config.json").write_text(json.dumps(APPLIED), encoding="utf-8")
    assert read_checkpoint_text(folder, 380, "default").repetition_penalty is None


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("num_beams", 5), ("no_repeat_ngram_size", 3), ("encoder_no_repeat_ngram_size", 2), ("min_new_tokens", 1)),
        *(("min_length", 10), ("bad_words_ids", [[5]]), ("suppress_tokens", [5]), ("begin_suppress_tokens", [5])),
        *(("forced_bos_token_id", 5), ("forced_eos_token_id", 2), ("penalty_alpha", 0.6), ("guidance_scale", 1.5)),
        *(("sequence_bias", [[[5], 1.0]]), ("exponential_decay_length_penalty", [5, 1.1]), ("stop_strings", "x")),
        *(("encoder_repetition_penalty", 1.2), ("num_return_sequences", 2), ("token_healing", True), ("max_time", 1)),
        *(("dola_layers", "low"), ("watermarking_config", {"bias": 2}), ("repetition_penalty", "1.05")),
        *(("repetition_penalty", 0), ("repetition_penalty", -1.5), ("repetition_penalty", True)),
    ],
)
def test_settings_that_change_greedy_answers_are_rejected_by_name(setting: str, value: object, folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({**APPLIED, setting: value}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=rf"{setting} .*[Rr]emove it") as caught:
        read_checkpoint_text(folder, 380, "default")
    assert str(folder / "generation_config.json") in str(caught.value)
