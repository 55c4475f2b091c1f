"""Engines of vLLM on a CPU, for tests: python engines.py '{"model": ..., "budget": ...}' prints answers of one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# In this process, so that tests see the model.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}
MODELS = Path(os.environ["SINKPRUNE_VLLM_MODELS"])
QUESTIONS = ("Is there a circle?", "What colour is the square?", "How many shapes are there?")
IMAGE_TOKENS = {"llava": 3, "llava-next": 380, "qwen2.5-vl": 375, "qwen3-vl": 5}


def overrides(budget: str | None) -> dict[str, Any]:
    return {"sinkprune": {"sanitizer_of": budget}} if budget else {}


def options(model: str, budget: str | None, **more: Any) -> dict[str, Any]:
    own = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1000, "max_num_seqs": 8, "block_size": 32}
    return {"model": str(MODELS / model), "hf_overrides": overrides(budget), "max_logprobs": -1, **own, **more}


def request(family: str, *numbers: int, question: str = QUESTIONS[0]) -> dict[str, Any]:
    """Return a question about one or more pictures."""
    from PIL import Image

    pictures = [Image.open(MODELS / f"{number}.png").convert("RGB") for number in numbers]
    prompt = "USER: " + "<image>\n" * len(pictures) + f"{question} ASSISTANT:"
    if family.startswith("qwen"):
        seen = "<|vision_start|><|image_pad|><|vision_end|>" * len(pictures)
        prompt = f"<|im_start|>user\n{seen}{question}<|im_end|>\n<|im_start|>assistant\n"
    return {"prompt": prompt, "multi_modal_data": {"image": pictures}}


def answers(llm: Any, requests: list[dict[str, Any]], tokens: int = 6) -> list[Any]:
    """Return vLLM's own outputs, greedy, with the log probabilities of all words at the first token."""
    from vllm import SamplingParams

    return llm.generate(requests, SamplingParams(temperature=0, max_tokens=tokens, logprobs=-1), use_tqdm=False)


def words(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def first_logprobs(output: Any) -> list[float]:
    found = output.outputs[0].logprobs[0]
    return [found[word].logprob for word in sorted(found)]


if __name__ == "__main__":
    from vllm import LLM

    own = LLM(**options(**json.loads(sys.argv[1])))
    model = json.loads(sys.argv[1])["model"]
    found = answers(own, [request(model, number) for number in range(3)])
    lengths = [len(output.prompt_token_ids) for output in found]
    sys.stdout.write(json.dumps([words(found), lengths, [first_logprobs(output) for output in found]]))
