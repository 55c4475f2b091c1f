"""Times vLLM on a preset of LLaVA, for rows next to those of `next_to_pytorch.py`.

    PYTHONPATH=benchmarks python benchmarks/gpu/next_to_vllm.py checkpoint --write llava-1.5-7b
    VLLM_PYTHON benchmarks/gpu/next_to_vllm.py checkpoint --like results.json --json vllm.json

vLLM brings its own PyTorch, so the second command runs in an environment of vLLM, without this project. The first one
writes the checkpoint without weights, which vLLM makes up. Never run with vLLM.

vLLM does not report its first token. So each round asks for one token about a new picture, and for all tokens about
another; `ttft` is the first time, and `per_token` the difference for each further token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rows_table import rows_table

WARM_UP = 3
ROW = "vLLM, CUDA graphs"


def write_checkpoint(folder: Path, model: str) -> None:
    """Write a preset's checkpoint without weights."""
    from peer_engines.checkpoint import make_checkpoint
    from sinkprune.export.checkpoint.presets import PRESETS

    make_checkpoint(folder, PRESETS[model], weights=False)


def frame(seed: int, size: tuple[int, int]) -> Image.Image:
    """Return a random picture of this width and height."""
    width, height = size
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def measured(
    llm: Any, new_params: Any, image_token: int, text_tokens: int, new_tokens: int, rounds: int, size: tuple[int, int]
) -> dict[str, list[float]]:
    """Return the milliseconds of each part in each round; `new_params` is vLLM's class `SamplingParams`."""
    half = text_tokens // 2
    ids = [1, *range(5, 5 + half), image_token, *range(9, 9 + text_tokens - half - 1)]

    def ms(seed: int, tokens: int) -> float:
        picture = frame(seed, size)
        params = new_params(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        began = time.perf_counter()
        (answer,) = llm.generate(
            {"prompt_token_ids": ids, "multi_modal_data": {"image": picture}}, params, use_tqdm=False
        )
        spent = (time.perf_counter() - began) * 1e3
        assert len(answer.outputs[0].token_ids) == tokens
        return spent

    found: dict[str, list[float]] = {"ttft": [], "per_token": []}
    for turn in range(WARM_UP + rounds):
        first, whole = ms(2 * turn, 1), ms(2 * turn + 1, new_tokens)
        if turn >= WARM_UP:
            found["ttft"].append(first)
            found["per_token"].append((whole - first) / (new_tokens - 1))
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--write", metavar="PRESET", help="write the checkpoint, and measure nothing")
    parser.add_argument(
        "--like", type=Path, metavar="FILE", help="as many text tokens as in next_to_pytorch.py's JSON"
    )
    parser.add_argument("--new-tokens", type=int, default=17)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--frame", default="1920x1080", metavar="WIDTHxHEIGHT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every time")
    options = parser.parse_args(arguments)
    if options.write:
        write_checkpoint(options.checkpoint, options.write)
        return
    from vllm import LLM, SamplingParams

    width, height = map(int, options.frame.split("x"))
    text_tokens = 67 if options.like is None else json.loads(options.like.read_text(encoding="utf-8"))["text_tokens"]
    config = json.loads((options.checkpoint / "config.json").read_text(encoding="utf-8"))
    image_token = config.get("image_token_index", config.get("image_token_id"))
    llm = LLM(
        model=str(options.checkpoint),
        load_format="dummy",
        dtype="float16",
        max_model_len=2048,
        max_num_seqs=1,
        limit_mm_per_prompt={"image": 1},
        enable_prefix_caching=False,
        gpu_memory_utilization=0.8,
    )
    times = measured(
        llm, SamplingParams, image_token, text_tokens, options.new_tokens, options.rounds, (width, height)
    )
    sys.stdout.write(rows_table({ROW: times}))
    if options.json:
        options.json.write_text(json.dumps({"ms": {ROW: times}}), encoding="utf-8")


if __name__ == "__main__":
    main()
