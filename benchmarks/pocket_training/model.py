"""The pocket model's shape, tokenizer and files: a LLaVA-1.5 of 7 million parameters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, processors
from torch import nn
from transformers import CLIPImageProcessorPil, LlavaConfig, LlavaForConditionalGeneration, PreTrainedTokenizerFast

from pocket_training.chunks import IN_CHUNKS
from pocket_training.lessons import description, draw_questions
from pocket_training.tokenizer import VOCABULARY, train_tokenizer
from sinkprune.demo.questions import KINDS
from sinkprune.demo.scenes import SIDE, compose_scene

SPECIAL = ("<unk>", "<s>", "</s>", "<image>", "<pad>")
EOS, IMAGE, PAD = 2, 3, 4
GRID = 16
PATCH = SIDE // GRID
BLOCKS = 6
"""Blocks of the tower up to its output. The checkpoint has one more, as vision_feature_layer is -2."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | upper }}: "
    "{% for item in message['content'] if item['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for item in message['content'] if item['type'] == 'text' %}{{ item['text'] }} {% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


class Dialogue(NamedTuple):
    """The words of a turn around the picture, the question and the answer, and two token ids."""

    before: str
    """The prompt before the picture."""
    after: str
    """The prompt after the picture, with ``{}`` for the question."""
    end: int
    """The token after an answer."""
    padding: int


DIALOGUE = Dialogue("USER: ", "\n{} ASSISTANT:", EOS, PAD)


def new_model() -> LlavaForConditionalGeneration:
    """Return the initialised model. While it trains, the tower's last layer is its feature layer."""
    config = LlavaConfig(
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 192,
            "intermediate_size": 768,
            "num_hidden_layers": BLOCKS,
            "num_attention_heads": 6,
            "image_size": SIDE,
            "patch_size": PATCH,
            "hidden_act": "gelu",
            "initializer_factor": 2.0,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 1024,
            "initializer_range": 0.05,
            "bos_token_id": 1,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            "tie_word_embeddings": True,
        },
        image_token_id=IMAGE,
        image_seq_length=GRID * GRID,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
        attn_implementation=IN_CHUNKS,
    )
    model = LlavaForConditionalGeneration(config)
    _see_neighbours(model.model.vision_tower)
    _look_for_likeness(model.model.language_model)
    return model


def tuned_from(checkpoint: Path) -> LlavaForConditionalGeneration:
    """Return `new_model` with the weights of a checkpoint that `save` wrote, in fp32."""
    model = new_model()
    saved = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).state_dict()
    # The last block of the checkpoint's tower is never computed.
    model.load_state_dict({name: saved[name] for name in model.state_dict()})
    return model


def _see_neighbours(tower: Any) -> None:
    """Initialise the tower's attention to near and alike patches, which small towers learn slowly.

    Positions start as sines and cosines of row and column; keys start as queries, so that attention starts as
    likeness (Trockman and Kolter, "Mimetic Initialization of Self-Attention Layers", 2023).
    """
    positions = tower.embeddings.position_embedding.weight
    quarter = positions.shape[1] // 4
    frequencies = 0.05 ** (torch.arange(quarter) / quarter)
    angles = torch.arange(GRID)[:, None] * frequencies
    wave = torch.cat([angles.sin(), angles.cos()], 1)
    rows, columns = wave[:, None].expand(-1, GRID, -1), wave[None].expand(GRID, -1, -1)
    with torch.no_grad():
        positions[1:] = torch.cat([rows, columns], 2).flatten(0, 1)
        for layer in tower.encoder.layers:
            nn.init.normal_(layer.self_attn.q_proj.weight, std=0.09)
            layer.self_attn.k_proj.weight.copy_(layer.self_attn.q_proj.weight)


def _look_for_likeness(decoder: Any) -> None:
    """Initialise the decoder so that a token attends to tokens like itself, and its own state prevails.

    Keys start as queries, as in the tower: "red" finds red things within a hundred steps instead of thousands.
    Residuals start small compared with the embeddings (Radford et al., GPT-2, section 2.3).
    """
    with torch.no_grad():
        nn.init.normal_(decoder.embed_tokens.weight, std=0.1)
        for layer in decoder.layers:
            nn.init.normal_(layer.self_attn.q_proj.weight, std=0.07)
            layer.self_attn.k_proj.weight.copy_(layer.self_attn.q_proj.weight)
            layer.self_attn.o_proj.weight *= (2 * len(decoder.layers)) ** -0.5
            layer.mlp.down_proj.weight *= (2 * len(decoder.layers)) ** -0.5


def save(model: LlavaForConditionalGeneration, tokenizer: Tokenizer, folder: Path) -> None:
    """Write `model` as an fp16 checkpoint in Hugging Face format.

    The tower gets a last block of zeros, because LLaVA-1.5 takes its features from the last block but one.
    """
    config = LlavaConfig.from_dict(model.config.to_dict())
    config.vision_config.num_hidden_layers = BLOCKS + 1
    config.vision_feature_layer = -2
    whole = LlavaForConditionalGeneration(config)
    missing, unexpected = whole.load_state_dict(model.state_dict(), strict=False)
    unused = f"vision_tower.encoder.layers.{BLOCKS}."
    if unexpected or not all(unused in name for name in missing):
        raise ValueError(f"the saved model differs from the trained one: lacks {missing}, has {unexpected}")
    for name, parameter in whole.named_parameters():
        if unused in name:
            torch.nn.init.zeros_(parameter)
    whole.generation_config.eos_token_id = EOS
    whole.half().save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    size = {"height": SIDE, "width": SIDE}
    CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size).save_pretrained(folder)


def new_tokenizer(scenes: int = 3000) -> Tokenizer:
    """Return a byte-level BPE tokenizer, trained on the questions about `scenes` training scenes."""
    tokenizer = train_tokenizer(_conversations(scenes), SPECIAL, unknown="<unk>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def _conversations(scenes: int) -> Iterator[str]:
    for index in range(scenes):
        scene = compose_scene("training", index)
        for question in (description(scene), *draw_questions(scene, Random(index), 10, list(KINDS))):
            yield f"{DIALOGUE.before}{DIALOGUE.after.format(question.prompt)} {question.answers[0]}"
