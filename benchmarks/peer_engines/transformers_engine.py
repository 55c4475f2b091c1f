"""transformers' own model in PyTorch, with scaled dot product attention and `generate`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peer_engines.checkpoint import chat_text, random_picture
from peer_engines.engine import Form, Loaded, NotRunError, Question, Timing, need
from peer_engines.transformers_policy import load_oft, load_pi0
from sinkprune.export.checkpoint.folder import read_json

_POLICIES = {"pi0": load_pi0, "openvla_oft": load_oft}
"""By `model_type`."""
_TYPES = {"fp32": ("float32", 32), "bf16": ("bfloat16", 16)}


def forms(config: Mapping[str, Any]) -> Sequence[Form]:
    """Return fp32 and bf16."""
    need("torch", "torch")
    need("transformers", "transformers")
    if config["model_type"] == "llava_next":
        raise NotRunError("pictures in tiles are not prepared for it here")
    return [Form("transformers", name, bits) for name, (_, bits) in _TYPES.items()]


def prepare(form: Form, place: Path) -> None:
    """Do nothing: `load` reads the checkpoint itself."""


def load(form: Form, place: Path, threads: int) -> Loaded:
    """Load the model on the CPU."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    checkpoint = place / "checkpoint"
    dtype = getattr(torch, _TYPES[form.name][0])
    if (load_policy := _POLICIES.get(read_json(checkpoint, "config.json")["model_type"])) is not None:
        return load_policy(place, dtype)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=dtype, attn_implementation="sdpa").eval()
    prompt = Prompt(checkpoint, model.config)
    tower = _Watch(_tower(model))

    class Clock(BaseStreamer):  # type: ignore[misc]
        """Records the time of the prompt, then of each token."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            """Do nothing."""

    def answer(question: Question) -> Timing:
        picture = Image.fromarray(random_picture(question.seed, question.side))
        clock, start = Clock(), time.perf_counter()
        inputs = prompt(chat_text(checkpoint, question.text), picture)
        inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
        prepared = time.perf_counter()
        tower.seconds = 0.0
        count = question.new_tokens
        answer = model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, streamer=clock)
        _, *times = clock.times
        vision_ms = (prepared - start + tower.seconds) * 1e3
        return Timing.of(start, times, vision_ms, inputs["input_ids"].shape[1], answer[0, -count:].tolist())

    parameters = [*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()]
    size = sum(parameter.nbytes for parameter in parameters) - model.get_input_embeddings().weight.nbytes
    return Loaded(answer, {name: version(name) for name in ("torch", "transformers")}, size)


class Prompt:
    """Turns words and a picture into the model's inputs, like the model's processor.

    Qwen's own processor needs torchvision, for videos.
    """

    def __init__(self, checkpoint: Path, config: Any) -> None:
        import transformers

        qwen = config.model_type.startswith("qwen")
        pictures = transformers.Qwen2VLImageProcessorPil if qwen else transformers.CLIPImageProcessorPil
        self._pictures = pictures.from_pretrained(checkpoint)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
        self._image = self._tokenizer.convert_ids_to_tokens(config.image_token_id)
        self._config = config

    def __call__(self, text: str, picture: Any) -> dict[str, Any]:
        seen = dict(self._pictures(images=picture, return_tensors="pt"))
        words = self._tokenizer(text.replace(self._image, self._image * self._rows(seen)), return_tensors="pt")
        ids = dict(words)
        if "image_grid_thw" in seen:
            ids["mm_token_type_ids"] = (ids["input_ids"] == self._config.image_token_id).int()
        return {**ids, **seen}

    def _rows(self, seen: Mapping[str, Any]) -> int:
        """Return the visual tokens of the picture."""
        vision = self._config.vision_config
        if "image_grid_thw" in seen:
            return int(seen["image_grid_thw"].prod()) // vision.spatial_merge_size**2
        return int((vision.image_size // vision.patch_size) ** 2)


class _Watch:
    """Sums the seconds of a module's calls since `seconds` was last set."""

    def __init__(self, module: Any) -> None:
        self.seconds, self._start = 0.0, 0.0
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._start


def _tower(model: Any) -> Any:
    inner = model.model
    return inner.vision_tower if hasattr(inner, "vision_tower") else inner.visual
