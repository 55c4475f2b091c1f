"""What vLLM keeps and answers with the plugin, and that it starts only if it can."""

from __future__ import annotations

import base64
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import sinkprune_vllm
import torch
import vllm
from sinkprune_vllm import llava, qwen
from transformers import AutoModelForImageTextToText
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.utils.network_utils import get_open_port

from engines import IMAGE_TOKENS, MODELS, QUESTIONS, answers, first_logprobs, options, overrides, request, words
from support.references.reference import beside_kept, sanitize

EXPECTED = json.loads((MODELS / "expected.json").read_text())
"""What `ort-cpu` keeps of each picture's groups, by family and budget."""
BUDGETS = [(family, budget) for family in EXPECTED for budget in EXPECTED[family]]
BATCHES = (1, 8, 2, 5, 4)


class Group(NamedTuple):
    """A group of tokens, and what is kept of it by the plugin and by the reference."""

    rows: np.ndarray
    found: tuple[list[int], np.ndarray]
    index: list[int]
    kept: np.ndarray


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
def selected(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """Return what is selected of each group, in the order of the pictures."""
    groups: list[Group] = []

    def select(rows: Any, salience: Any, counts: Any, norms: Any = None, width: int | None = None) -> Any:
        kept, index = own(rows, salience, counts, norms, width)
        norms = rows.norm(dim=-1) if norms is None else norms
        for group, *given in zip(*(x.numpy() for x in (rows, norms, salience, index, kept)), strict=True):
            lengths, received, *found = given
            _, source = sanitize(group[:, :width], lengths, received, reserve=counts.reserve, diverse=counts.diverse)
            expected = beside_kept(group[None], lengths, source, sink=True)[0]
            groups.append(Group(group, (found[0].tolist(), found[1]), source, expected))
        return kept, index

    own = llava.select
    for module in (llava, qwen):
        monkeypatch.setattr(module, "select", select)
    return groups


@pytest.mark.parametrize(("family", "budget"), BUDGETS)
def test_kept_sets_equal_the_reference_and_ort_cpu(
    family: str, budget: str, start: Callable[..., vllm.LLM], selected: list[Group]
) -> None:
    # Pillow scales pictures, as in sinkprune. By torchvision's pixels, near ties fall otherwise.
    scaled = {} if family.startswith("qwen") else {"mm_processor_kwargs": {"backend": "pil"}}
    llm, number = start(family, budget, **scaled), 0
    selected.clear()
    lengths = []
    for size in BATCHES:
        found = answers(llm, [request(family, number + each) for each in range(size)], 1)
        lengths += [output.prompt_token_ids.count(IMAGE_TOKENS[family]) for output in found]
        number += size
    expected = EXPECTED[family][budget]
    assert [group.found[0] for group in selected] == [index for picture in expected for index in picture]
    assert lengths == [sum(map(len, picture)) for picture in expected]
    for group in selected:
        assert group.found[0] == group.index
        np.testing.assert_allclose(group.found[1], group.kept, rtol=1e-4, atol=1e-5)


def positions(model: Any, ids: list[int], image: int, groups: list[Group], grids: list[list[int]]) -> torch.Tensor:
    """Return transformers' positions [3,1,S] of the unpruned prompt, for the tokens that are left of it."""
    whole, left, pictures = [], [], iter(groups)
    for is_image, run in groupby(ids, image.__eq__):
        group, begin = next(pictures) if is_image else None, len(whole)
        whole += [image] * len(group.rows) if group else run
        left += [begin + own for own in (group.index if group else range(len(whole) - begin))]
    prompt = torch.tensor(whole)[None]
    return model.model.get_rope_index(prompt, (prompt == image).int(), torch.tensor(grids))[0][..., left]


@torch.no_grad()
def transformers_logprobs(family: str, asked: dict[str, Any], ids: list[int], groups: list[Group]) -> np.ndarray:
    """Return those of the first token of an answer, over the tokens that the reference keeps."""
    model = AutoModelForImageTextToText.from_pretrained(MODELS / "saved" / family, dtype=torch.float32).eval()
    prompt, kept = torch.tensor(ids), torch.from_numpy(np.concatenate([group.kept for group in groups]))
    image, embeddings = prompt == IMAGE_TOKENS[family], model.get_input_embeddings()(prompt)
    more, width = {}, embeddings.shape[1]
    if family.startswith("llava"):
        kept = model.model.multi_modal_projector(kept)
    else:
        grids = [[1, each.height // 14, each.width // 14] for each in asked["multi_modal_data"]["image"]]
        more["position_ids"] = positions(model, ids, IMAGE_TOKENS[family], groups, grids)
    if family == "qwen3-vl":
        more |= {"visual_pos_masks": image[None], "deepstack_visual_embeds": kept[:, width:].split(width, 1)}
    embeddings[image] = kept[:, :width]
    state = model.model.language_model(inputs_embeds=embeddings[None], **more).last_hidden_state[0, -1]
    return model.lm_head(state).log_softmax(-1).numpy()


@pytest.mark.parametrize("family", EXPECTED)
def test_answers_are_those_of_transformers_alone_in_a_batch_in_chunks_and_from_the_prefix_cache(
    family: str, start: Callable[..., vllm.LLM], selected: list[Group]
) -> None:
    budget = list(EXPECTED[family])[-1]
    asked = [request(family, number, question=QUESTIONS[number % 3]) for number in range(6)]
    # The same picture with another question, and two pictures.
    asked += [request(family, 0, question=QUESTIONS[1]), request(family, 2, 3)]
    llm = start(family, budget)
    selected.clear()
    together, again = answers(llm, asked), answers(llm, asked)
    first, last = (sum(map(len, EXPECTED[family][budget][:picture])) for picture in (2, 4))
    pair = selected[first:last]
    assert sum(output.num_cached_tokens for output in again) > 0
    llm.reset_prefix_cache()
    llm.reset_mm_cache()
    alone = [answers(llm, [each])[0] for each in asked]
    chunked = answers(start(family, budget, max_num_batched_tokens=48, enable_prefix_caching=False), asked)
    for found in (together, again, chunked):
        assert words(found) == words(alone)
        np.testing.assert_allclose([*map(first_logprobs, found)], [*map(first_logprobs, alone)], atol=1e-4)
    expected = transformers_logprobs(family, asked[-1], alone[-1].prompt_token_ids, pair)
    np.testing.assert_allclose(first_logprobs(alone[-1]), expected, atol=1e-4)


@pytest.mark.parametrize("family", ["llava", "qwen3-vl"])
def test_without_the_option_vllm_behaves_as_without_the_plugin(family: str) -> None:
    command = [sys.executable, Path(__file__).with_name("engines.py"), json.dumps({"model": family, "budget": None})]
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
        one = request("llava", 0)
        items = processor.info.parse_mm_data(one["multi_modal_data"])
        made = processor(one["prompt"], mm_items=items)
        keys.append(made["mm_hashes"]["image"])
    assert len({key for own in keys for key in own}) == 3
    assert keys[1] == [f"{keys[0][0]}-sinkpruner-no-text-pruner-retain-64"]


def test_a_pruned_qwen_takes_no_video() -> None:
    config = EngineArgs(**options("qwen3-vl", "prune-80")).create_model_config()
    with pytest.raises(VLLMValidationError, match="At most 0 video"):
        MULTIMODAL_REGISTRY.create_processor(config).info.validate_num_items("video", 1)


QWEN, SIGLIP = {"model": str(MODELS / "qwen3-vl")}, {"model_type": "siglip_vision_model"}
WRONG = {
    "another budget's name": ({"hf_overrides": overrides("retain-65")}, "has retain-192, retain-128"),
    "no name": ({"hf_overrides": {"sinkprune": "retain-64"}}, "expected the name of a budget"),
    "a misspelt option": ({"hf_overrides": {"sinkprun": {"sanitizer_of": "retain-64"}}}, "expected 'sinkprune'"),
    "null": ({"hf_overrides": {"sinkprune": None}}, "expected the name of a budget"),
    "another key": ({"hf_overrides": {"sinkprune": {"budget": "retain-64"}}}, "expected the name of a budget"),
    "SigLIP": ({"hf_overrides": {**overrides("retain-64"), "vision_config": SIGLIP}}, "it needs clip_vision_model"),
    "a compiled tower": ({"compilation_config": {"compile_mm_encoder": True}}, "compile_mm_encoder"),
    "stages": ({**QWEN, "hf_overrides": overrides("prune-80"), "pipeline_parallel_size": 2}, "pipeline-parallel"),
    "embeddings": ({"enable_mm_embeds": True}, "--enable-mm-embeds"),
    "another family's budget": (QWEN, "has prune-66.7, prune-77.8"),
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
    port = get_open_port()
    own = options("llava", "retain-64")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port), "--enforce-eager"]
    for name in ("model", "dtype", "max_model_len", "max_num_seqs", "block_size"):
        command += [f"--{name.replace('_', '-')}", str(own[name])]
    command += ["--hf-overrides", json.dumps(own["hf_overrides"])]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            # The client tries again until the server listens.
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=100)
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
