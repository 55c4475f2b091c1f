"""Times a bundle of random weights next to the same model in PyTorch, on one GPU.

    sinkprune-export llava-1.5-7b --random-weights --precision fp16 -o llava-7b
    python benchmarks/gpu/next_to_pytorch.py llava-1.5-7b llava-7b --json results.json
    sinkprune-export pi0 --random-weights --precision fp16 -o pi0
    python benchmarks/gpu/next_to_pytorch.py pi0 pi0 --json results.json

PyTorch runs transformers' own model with scaled dot product attention, in each type of --dtype: eager and compiled.
Compiled, LLaVA has a static cache, for which transformers compiles the decoder's steps into CUDA graphs. Compiled, a
policy's denoising step goes through `torch.compile`; transformers 5.17 fails there with CUDA graphs. All rows take
turns in every round, on the same new picture. Weights are random: times are true, answers are noise.

`ttft` of a policy is the time from frames to actions, and a token is a denoising step. Without a GPU, try the script
with `--device cpu --backend ort-cpu`. With a GPU, CUPTI then counts what each row computes on it in one more request:
where the device is idle for most of a request, launches bound it, and fewer tokens gain little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from rows_table import PARTS, rows_table
from sinkprune import Pipeline, Policy
from sinkprune.contract.checks import to_json
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.files.output_files import check_writable, write_whole
from sinkprune.export.checkpoint.presets import PRESETS

QUESTION = "What is in the cup, and what lies on the saucer?"
CAMERAS = 3
WARM_UP = 3

Times = Mapping[str, float]
"""Milliseconds by part, those of `PARTS`."""
Row = Callable[[int], Times]
"""Answers about the picture of a seed, or acts on it."""


def picture(seed: int, side: int = 336) -> Image.Image:
    """Return a random picture of `side` pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    return Image.fromarray(pixels)


def frame(seed: int, size: tuple[int, int]) -> Image.Image:
    """Return a random picture of this width and height."""
    return picture(seed, max(size)).crop((0, 0, *size))


def our_answers(pipeline: Pipeline, budget: str, new_tokens: int, size: tuple[int, int]) -> Row:
    """Return a row of our chain at `budget`."""

    def answer(seed: int) -> Times:
        # Greedy, without rules for tokens: logits stay on the device.
        ms = pipeline.generate(frame(seed, size), QUESTION, budget=budget, max_new_tokens=new_tokens).ms
        return {part: ms[part] for part in PARTS}

    return answer


def our_chunks(policy: Policy, budget: str, steps: int) -> Row:
    """Return a row of our policy at `budget`."""
    state = [0.0] * len(policy.facts.usual_state)

    def act(seed: int) -> Times:
        frames = [picture(seed * CAMERAS + camera, 224) for camera in range(CAMERAS)]
        chunk = policy.act(frames, QUESTION, state, budget=budget, steps=steps, seed=seed)
        step = statistics.median(chunk.step_ms)
        return {**chunk.ms, "ttft": chunk.ms["latency"], "per_token": step}

    return act


def pytorch_answers(
    config: Mapping[str, Any], dtype: Any, device: str, prompt: int, new_tokens: int, size: tuple[int, int]
) -> dict[str, Row]:
    """Return the rows of transformers' LLaVA. `prompt` is the number of text tokens."""
    known = transformers.AutoConfig.for_model(**config)
    with torch.device(device):
        model = transformers.LlavaForConditionalGeneration._from_config(
            known, dtype=dtype, attn_implementation="sdpa"
        )
    model.eval()
    side, patch = known.vision_config.image_size, known.vision_config.patch_size
    processor = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )
    clock, decoder = _Clock(device), _Clock(device)
    tower = _Clock(device)
    model.model.vision_tower.register_forward_pre_hook(tower.begin)
    model.model.vision_tower.register_forward_hook(tower.end)
    model.model.language_model.register_forward_pre_hook(decoder.begin_first)
    image = [known.image_token_id] * (side // patch) ** 2
    ids = torch.tensor(
        [[1, *range(5, 5 + prompt // 2), *image, *range(9, 9 + prompt - prompt // 2 - 1)]], device=device
    )

    def answer(cache: str, seed: int) -> Times:
        seen, streamer = frame(seed, size), _Tokens()
        clock.begin()
        decoder.started = None
        pixels = processor(images=seen, return_tensors="pt")["pixel_values"].to(device, dtype)
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=pixels,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            cache_implementation=cache,
            pad_token_id=0,
            streamer=streamer,
        )
        _, first, *later = streamer.times
        return {
            "ttft": (first - clock.started) * 1e3,
            "vision": tower.ms,
            "prefill": (first - decoder.started) * 1e3,
            "per_token": (later[-1] - first) * 1e3 / len(later),
        }

    return {"eager": partial(answer, "dynamic"), "compiled": partial(answer, "static")}


def pytorch_chunks(
    config: Mapping[str, Any], dtype: Any, device: str, prompt: int, steps: int, size: tuple[int, int]
) -> dict[str, Row]:
    """Return the rows of transformers' pi0. `prompt` is the number of text tokens."""
    known = transformers.AutoConfig.for_model(**config)
    with torch.device(device):
        model = transformers.PI0ForConditionalGeneration._from_config(known, dtype=dtype, attn_implementation="sdpa")
    model.eval()
    vision = known.vlm_config.vision_config
    tokens = (vision.image_size // vision.patch_size) ** 2 * CAMERAS
    ids = torch.tensor([[known.vlm_config.image_token_id] * tokens + list(range(5, 5 + prompt))], device=device)
    clock, tower, prefix = _Clock(device), _Clock(device), _Clock(device)
    model.model.vlm.vision_tower.register_forward_hook(tower.end)
    model.model.vlm.register_forward_hook(prefix.end)
    eager = model.forward
    # On a processor only the tracing is tried: compiling takes minutes.
    compiled = torch.compile(eager, backend="eager" if device == "cpu" else "inductor")

    def act(step: Any, seed: int) -> Times:
        model.forward = step
        frames = [picture(seed * CAMERAS + camera, vision.image_size) for camera in range(CAMERAS)]
        rng = torch.Generator(device).manual_seed(seed)
        clock.begin()
        pixels = (
            np.stack([np.asarray(frame) for frame in frames]).transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1
        )
        shape = (1, known.chunk_size, known.max_action_dim)
        model.sample_actions(
            state=torch.zeros(1, known.max_state_dim, device=device, dtype=dtype),
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=torch.from_numpy(pixels)[None].to(device, dtype),
            pixel_attention_mask=torch.ones(1, CAMERAS, dtype=torch.bool, device=device),
            noise=torch.randn(shape, generator=rng, device=device, dtype=dtype),
            num_steps=steps,
        ).cpu()
        end = time.perf_counter()
        return {
            "ttft": (end - clock.started) * 1e3,
            "vision": (tower.ended - clock.started) * 1e3,
            "prefill": (prefix.ended - tower.ended) * 1e3,
            "per_token": (end - prefix.ended) * 1e3 / steps,
        }

    return {"eager": partial(act, eager), "compiled": partial(act, compiled)}


class _Clock:
    """Reads the time when the device has done all work."""

    def __init__(self, device: str) -> None:
        self._cuda = device != "cpu"
        self.started: Any = None
        self.ended = 0.0

    @property
    def ms(self) -> float:
        return float(self.ended - self.started) * 1e3

    def begin(self, *_: Any) -> None:
        self.started = self._now()

    def begin_first(self, *_: Any) -> None:
        """Begin, unless it has begun."""
        if self.started is None:
            self.begin()

    def end(self, *_: Any) -> None:
        self.ended = self._now()

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


class _Tokens(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc]
    """Records the time of the prompt, then of each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


def measured(rows: Mapping[str, Row], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the milliseconds of every row and part. Rows take turns, and another row begins each round."""
    found: dict[str, dict[str, list[float]]] = {name: {part: [] for part in PARTS} for name in rows}
    names = list(rows)
    for turn in range(WARM_UP + rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times = rows[name](turn)
            if turn >= WARM_UP:
                for part in PARTS:
                    found[name][part].append(times[part])
    return found


def device_work(rows: Mapping[str, Row], seed: int) -> dict[str, dict[str, float]]:
    """Return the kernels and copies of one request of each row, and their time on the device in ms.

    CUPTI sees all work of the process, also that of ONNX Runtime.
    """
    work = {}
    for name, row in rows.items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            row(seed)
        on_device = [each for each in seen.events() if each.device_type == torch.autograd.DeviceType.CUDA]
        work[name] = {
            "device_ms": sum(each.time_range.elapsed_us() for each in on_device) / 1e3,
            "launched": len(on_device),
        }
    return work


def _size(text: str) -> tuple[int, int]:
    width, height = text.split("x")
    return int(width), int(height)


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", choices=sorted(name for name in PRESETS if name.startswith(("llava-1", "pi0"))))
    parser.add_argument("bundle", type=Path, help="the bundle of this preset")
    parser.add_argument("--backend", default="ort-cuda")
    parser.add_argument("--device", default="cuda", help="PyTorch's")
    parser.add_argument(
        "--dtype", nargs="+", default=["float16"], choices=["float16", "bfloat16", "float32"], help="PyTorch's"
    )
    parser.add_argument("--new-tokens", type=int, default=17, help="of a policy: denoising steps")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--frame", type=_size, default=(336, 336), metavar="WIDTHxHEIGHT", help="of LLaVA's pictures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every time too")
    options = parser.parse_args(arguments)
    if options.json:
        check_writable(options.json, (".json",))
    torch.set_grad_enabled(False)
    config = PRESETS[options.model]
    if config["model_type"] == "llava":
        loaded = pipeline = Pipeline.load(options.bundle, backend=options.backend)
        prompt = pipeline.generate(picture(0), QUESTION, max_new_tokens=1).prompt_tokens
        pytorch_rows = pytorch_answers
        ours = {
            budget: our_answers(pipeline, budget, options.new_tokens, options.frame)
            for budget in ("none", *pipeline.bundle.manifest.budgets)
        }
    else:
        loaded = policy = Policy.load(options.bundle, backend=options.backend)
        prompt = policy.act(
            [picture(0, 224)] * CAMERAS, QUESTION, [0.0] * len(policy.facts.usual_state)
        ).prompt_tokens
        pytorch_rows = pytorch_chunks
        ours = {
            budget: our_chunks(policy, budget, options.new_tokens)
            for budget in ("none", *policy.bundle.manifest.budgets)
        }
    rows = {
        f"PyTorch {dtype}, {name}": row
        for dtype in options.dtype
        for name, row in pytorch_rows(
            config, getattr(torch, dtype), options.device, prompt, options.new_tokens, options.frame
        ).items()
    }
    rows |= {f"{options.backend} {budget}": row for budget, row in ours.items()}
    found = measured(rows, options.rounds)
    device = torch.cuda.get_device_name() if options.device != "cpu" else "CPU"
    sys.stdout.write(f"{device}, torch {torch.__version__}, transformers {transformers.__version__}, ")
    sys.stdout.write(f"{prompt} text tokens, medians of {options.rounds} rounds (least to most)\n{rows_table(found)}")
    work = device_work(rows, options.rounds + WARM_UP) if options.device != "cpu" else {}
    for name, each in work.items():
        sys.stdout.write(f"{name}: {each['launched']} kernels and copies, {each['device_ms']:.2f} ms of the device\n")
    if options.json:
        captured = to_json(loaded.backend.captured())
        report = {"device": device, "text_tokens": prompt, "ms": found, "device_work": work, "captured": captured}
        write_whole(options.json, json.dumps(report).encode())


if __name__ == "__main__":
    sys.exit(main())
