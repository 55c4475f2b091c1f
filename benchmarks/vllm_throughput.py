"""Measures vLLM with the plugin and without its option, in turn: requests a second and time to the first token.

    python benchmarks/peers.py --folder peers --only transformers --prepare      # writes peers/llava-1.1b/checkpoint
    python benchmarks/vllm_throughput.py peers/llava-1.1b/checkpoint --random-weights
    python benchmarks/vllm_throughput.py peers/llava-1.1b/checkpoint --random-weights --selection

Run it in the environment of `make test-vllm`, with the variables that docs/vllm.md names. Both engines stay loaded.
Each measurement sends a number of requests at once, about pictures that no cache holds, and waits for all answers.
`--selection` measures what the selection takes of the vision tower's time instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PROMPT = "USER: <image>\nWhat is there on the old chair? ASSISTANT:"


def request(seed: int, side: int) -> dict[str, Any]:
    """Return a question about a picture of blocks of random colours."""
    from PIL import Image

    blocks = np.random.default_rng(seed).integers(0, 256, (side // 16, side // 16, 3))
    picture = np.kron(blocks, np.ones((16, 16, 1), int)).astype(np.uint8)
    return {"prompt": PROMPT, "multi_modal_data": {"image": Image.fromarray(picture)}}


def engine_options(options: argparse.Namespace, budget: str | None) -> dict[str, Any]:
    weights = {"load_format": "dummy"} if options.random_weights else {}
    return {
        "model": str(options.model),
        "dtype": options.dtype,
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": max(options.at_once),
        "hf_overrides": {"sinkprune": {"sanitizer_of": budget}} if budget else {},
        **weights,
    }


async def ask(engine: Any, name: str, seed: int, options: argparse.Namespace) -> float:
    """Return the milliseconds to the first token of a request that runs to its end."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0, max_tokens=options.new_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    started, first = time.perf_counter(), None
    async for _ in engine.generate(request(seed, options.side), sampling, request_id=name):
        first = first or time.perf_counter()
    assert first is not None
    return 1000 * (first - started)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    budgets = {"none": None, options.budget: options.budget}
    engines = {
        name: AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_options(options, budget)))
        for name, budget in budgets.items()
    }
    found: dict[tuple[str, int], tuple[list[float], list[float]]] = {}
    seed = 0
    for engine in engines.values():
        await ask(engine, f"warm-up-{seed}", seed := seed + 1, options)
    for number in range(options.repeat):
        for at_once in options.at_once:
            names = list(engines)
            for name in names[number % 2 :] + names[: number % 2]:
                seeds = range(seed := seed + 1000, seed + at_once)
                started = time.perf_counter()
                firsts = await asyncio.gather(*(ask(engines[name], str(own), own, options) for own in seeds))
                rates, waits = found.setdefault((name, at_once), ([], []))
                rates.append(at_once / (time.perf_counter() - started))
                waits.extend(firsts)
                sys.stderr.write(f"{name} {at_once} at once: {rates[-1]:.3f} requests a second\n")
    for engine in engines.values():
        engine.shutdown()
    return {
        f"{name} x{at_once}": {
            "requests_per_s": float(np.median(rates)),
            "first_token_ms": {"median": float(np.median(waits)), "p95": float(np.quantile(waits, 0.95))},
        }
        for (name, at_once), (rates, waits) in found.items()
    }


def selection_share(options: argparse.Namespace) -> dict[str, float]:
    """Return the milliseconds of a picture in the vision tower, and in salience and selection."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from sinkprune_vllm import llava
    from vllm import LLM, SamplingParams

    spent = {"tower_ms": [0.0], "selection_ms": [0.0]}

    def timed(own: Callable[..., Any], key: str) -> Callable[..., Any]:
        def run(*given: Any, **more: Any) -> Any:
            started = time.perf_counter()
            result = own(*given, **more)
            spent[key][-1] += 1000 * (time.perf_counter() - started)
            return result

        return run

    llava.select, llava.cls_salience = (timed(own, "selection_ms") for own in (llava.select, llava.cls_salience))
    llm = LLM(**engine_options(options, options.budget))
    llm.apply_model(
        lambda model: setattr(model.vision_tower, "forward", timed(model.vision_tower.forward, "tower_ms"))
    )
    for seed in range(options.repeat + 1):
        for times in spent.values():
            times.append(0.0)
        llm.generate([request(seed, options.side)], SamplingParams(max_tokens=1), use_tqdm=False)
    return {key: float(np.median(times[2:])) for key, times in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path)
    add("--budget", default="retain-64")
    add("--random-weights", action="store_true", help="read no weights from the folder")
    add("--dtype", default="bfloat16")
    add("--at-once", type=lambda text: [int(each) for each in text.split(",")], default=[1, 4, 16, 64])
    add("--new-tokens", type=int, default=32)
    add("--side", type=int, default=336, help="pixels of the pictures' sides (default: 336)")
    add("--repeat", type=int, default=3)
    add("--selection", action="store_true", help="the share of the selection in the tower's time")
    options = parser.parse_args()
    result = selection_share(options) if options.selection else asyncio.run(measure(options))
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
