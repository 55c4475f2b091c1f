"""What vLLM keeps and answers with the plugin, and that it starts only if it can."""

from __future__ import annotations

import base64
import gc
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import sinkprune_vllm
import torch
import vllm
from sinkprune_vllm import llava
from transformers import AutoModelForImageTextToText
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY

from engines import MODELS, QUESTIONS, answers, first_logprobs, options, overrides, request, words
from support.references.reference import largest, sanitize

EXPECTED = json.loads((MODELS / "expected.json").read_text())
"""What `ort-cpu` keeps of each picture's groups, by family and budget."""
IMAGE_TOKENS = {"llava": 3, "llava-next": 380}
POCKET = Path(__file__).parents[3] / "demo/pocket"
BUDGETS = [(family, budget) for family in ("llava", "llava-next") for budget in EXPECTED[family]]
BATCHES = (1, 8, 2, 5, 4)


@pytest.fixture
def start() -> Iterator[Callable[..., vllm.LLM]]:
    """Start engines that end with the test."""
    started: list[vllm.LLM] = []

    def engine(model: str, budget: str | None, **more: Any) -> vllm.LLM:
        started.append(vllm.LLM(**options(model, budget, **more)))
        return started[-1]

    yield engine
    started.clear()
    gc.collect()
    cleanup_dist_env_and_memory()


@pytest.fixture
def selected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return what is selected of each group: tokens, salience, counts, kept rows and index."""
    found: list[tuple[Any, ...]] = []

    def select(tokens: torch.Tensor, salience: torch.Tensor, counts: Any) -> Any:
        kept, index = own(tokens, salience, counts)
        groups = zip(tokens.numpy(), salience.numpy(), kept.numpy(), index.tolist(), strict=True)
        found.extend((*group[:2], counts, *group[2:]) for group in groups)
        return kept, index

    own = llava.select
    monkeypatch.setattr(llava, "select", select)
    return found


@pytest.mark.parametrize(("family", "budget"), BUDGETS)
def test_kept_sets_equal_the_reference_and_ort_cpu(
    family: str, budget: str, start: Callable[..., vllm.LLM], selected: list[tuple[Any, ...]]
) -> None:
    # Pillow scales pictures, as in sinkprune. By torchvision's pixels, near ties fall otherwise.
    llm, number = start(family, budget, mm_processor_kwargs={"backend": "pil"}), 0
    selected.clear()
    lengths = []
    for size in BATCHES:
        found = answers(llm, [request(number + each) for each in range(size)], 1)
        lengths += [output.prompt_token_ids.count(IMAGE_TOKENS[family]) for output in found]
        number += size
    expected = EXPECTED[family][budget]
    assert [group[4] for group in selected] == [index for picture in expected for index in picture]
    assert lengths == [sum(map(len, picture)) for picture in expected]
    for tokens, salience, counts, kept, index in selected:
        norms = np.linalg.norm(tokens, axis=1)
        rows, source = sanitize(tokens, norms, salience, reserve=counts.reserve, diverse=counts.diverse)
        assert index == source
        np.testing.assert_allclose(kept, rows, rtol=1e-4, atol=1e-5)


def test_logits_equal_those_of_transformers_over_the_same_tokens(
    start: Callable[..., vllm.LLM], selected: list[tuple[Any, ...]]
) -> None:
    llm = start("llava", "retain-64")
    selected.clear()
    output = answers(llm, [request(0)], 1)[0]
    (group,) = selected
    rows = torch.from_numpy(group[0])
    kept = rows[torch.tensor(group[4])]
    kept[0] = rows[largest(rows.norm(dim=-1).numpy(), group[2].outliers)].mean(0)
    model = AutoModelForImageTextToText.from_pretrained(POCKET, dtype=torch.float32).eval()
    ids = torch.tensor(output.prompt_token_ids)
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(ids)
        embeddings[ids == IMAGE_TOKENS["llava"]] = model.model.multi_modal_projector(kept)
        logits = model(inputs_embeds=embeddings[None]).logits[0, -1]
    np.testing.assert_allclose(first_logprobs(output), logits.log_softmax(-1).numpy(), atol=1e-4)


@pytest.mark.parametrize(("family", "budget"), [("llava", "retain-64"), ("llava-next", "retain-160")])
def test_answers_are_the_same_alone_in_a_batch_in_chunks_and_from_the_prefix_cache(
    family: str, budget: str, start: Callable[..., vllm.LLM]
) -> None:
    requests = [request(number, QUESTIONS[number % 3]) for number in range(8)]
    llm = start(family, budget)
    together = answers(llm, requests)
    # The same picture with another question, and the same request.
    again = answers(llm, [request(0, QUESTIONS[1]), *requests])
    assert min(output.num_cached_tokens for output in again) > 0
    llm.reset_prefix_cache()
    llm.reset_mm_cache()
    alone = [answers(llm, [each])[0] for each in [request(0, QUESTIONS[1]), *requests]]
    assert words(together) == words(alone[1:])
    assert words(again) == words(alone)
    chunked = start(family, budget, max_num_batched_tokens=96, enable_prefix_caching=False)
    assert words(answers(chunked, requests)) == words(together)


def test_without_the_option_vllm_behaves_as_without_the_plugin() -> None:
    command = [sys.executable, Path(__file__).with_name("engines.py"), json.dumps({"model": "llava", "budget": None})]
    found = []
    for plugins in ("sinkprune", ""):
        ran = subprocess.run(
            command, env={**os.environ, "VLLM_PLUGINS": plugins}, capture_output=True, text=True, check=True
        )
        found.append(json.loads(ran.stdout.splitlines()[-1]))
    assert found[0] == found[1]


def test_the_cache_keys_of_pictures_hold_the_budget() -> None:
    keys = []
    for budget in (None, "retain-64", "retain-32"):
        config = EngineArgs(**options("llava", budget)).create_model_config()
        processor = MULTIMODAL_REGISTRY.create_processor(config)
        one = request(0)
        items = processor.info.parse_mm_data(one["multi_modal_data"])
        made = processor(one["prompt"], mm_items=items)
        keys.append(made["mm_hashes"]["image"])
    assert len({key for own in keys for key in own}) == 3
    assert keys[1] == [f"{keys[0][0]}-sinkpruner-no-text-pruner-retain-64"]


SIGLIP = {"model_type": "siglip_vision_model"}
WRONG = {
    "another budget's name": ({"hf_overrides": overrides("retain-65")}, "has retain-192, retain-128"),
    "no name": ({"hf_overrides": {"sinkprune": "retain-64"}}, "expected the name of a budget"),
    "another key": ({"hf_overrides": {"sinkprune": {"budget": "retain-64"}}}, "expected the name of a budget"),
    "SigLIP": ({"hf_overrides": {**overrides("retain-64"), "vision_config": SIGLIP}}, "needs clip_vision_model"),
    "a compiled tower": ({"compilation_config": {"compile_mm_encoder": True}}, "compile_mm_encoder"),
    "embeddings": ({"enable_mm_embeds": True}, "--enable-mm-embeds"),
    "Qwen": ({"model": str(Path(__file__).parents[3] / "demo/pocket-qwen3")}, "max_pixels"),
    "transformers' model": ({"model_impl": "transformers"}, "vLLM runs this model as Transformers"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_pruned_is_an_error_at_start(case: str) -> None:
    given, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        EngineArgs(**{**options("llava", "retain-64"), **given}).create_engine_config()


def test_another_vllm_is_an_error_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.0+cpu")
    with pytest.raises(RuntimeError, match=r"works with vLLM 0.32, found 0.33.0\+cpu"):
        sinkprune_vllm.register()


def test_the_server_gives_the_same_answers(start: Callable[..., vllm.LLM], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = options("llava", "retain-64")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port), "--enforce-eager"]
    for name in ("model", "dtype", "max_model_len", "max_num_seqs", "block_size"):
        command += [f"--{name.replace('_', '-')}", str(own[name])]
    command += ["--hf-overrides", json.dumps(own["hf_overrides"])]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
            for _ in range(600):
                try:
                    client.models.list()
                    break
                except openai.APIConnectionError:
                    assert server.poll() is None, (tmp_path / "log").read_text()
                    time.sleep(1)
            url = "data:image/png;base64," + base64.b64encode((MODELS / "0.png").read_bytes()).decode()
            text = {"type": "text", "text": QUESTIONS[0]}
            content = [{"type": "image_url", "image_url": {"url": url}}, text]
            found = client.chat.completions.create(
                model=own["model"],
                messages=[{"role": "user", "content": content}],
                temperature=0,
                max_tokens=6,
            )
        finally:
            server.terminate()
    conversation = [{"role": "user", "content": content}]
    expected = start("llava", "retain-64").chat(
        conversation, vllm.SamplingParams(temperature=0, max_tokens=6), use_tqdm=False
    )[0]
    assert found.choices[0].message.content == expected.outputs[0].text
    assert found.usage.prompt_tokens == len(expected.prompt_token_ids)
