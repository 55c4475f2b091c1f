"""Records what a chain computes for a question, to compare engines with.

Calls are in files: a build may delete a graph and its weights, and resumes after a kill. At most one call of one
graph is in memory at a time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks import counted
from sinkprune.contract.errors import EnginesError, ImageError, NumericsError, PromptError, UsageError
from sinkprune.contract.files.folders import sync_tree
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.memory import available_bytes, running_need
from sinkprune.contract.precision import Array
from sinkprune.contract.registry import Registry
from sinkprune.contract.schedule import VisualLayout, schedule
from sinkprune.engines.progress import BuildProgress
from sinkprune.runtime.backends import Backend, Engine, Tensor, load_backend
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.backends.known import KNOWN
from sinkprune.runtime.backends.kv_cache import cache_names
from sinkprune.runtime.families import Fit, load_family
from sinkprune.runtime.families.policies import state_prompt
from sinkprune.runtime.hooks import Observer
from sinkprune.runtime.media.frame import Picture
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.chain import Wrap
from sinkprune.runtime.steps.context_length import check_picture_count
from sinkprune.runtime.steps.decoding import Kept
from sinkprune.runtime.steps.pictures import decoded
from sinkprune.runtime.steps.request import check_texts
from sinkprune.runtime.text.prompt import PromptEncoder

NEW_TOKENS = 8
"""Tokens of each answer: a decoder's first call fills its caches, the others read them."""


@dataclass(frozen=True)
class GateQuestion:
    """Pictures and a prompt, for the graphs and the engines. A policy acts on them instead."""

    images: Sequence[Picture]
    """The decoded pictures of one prompt; for a policy, the frame of each camera."""
    prompt: str
    """The question; for a policy, the instruction."""
    new_tokens: int = NEW_TOKENS
    """Tokens of each answer; fewer if the engines accept fewer."""
    fit: Fit | None = None
    """How a picture becomes a square; None is the checkpoint's own way."""

    def seen_shares(self, manifest: Manifest) -> tuple[float, ...]:
        """Return the share of each picture's area that the model sees. Raises `ImageError`."""
        family = load_family(manifest, self.fit)
        return tuple(family.layout(image).seen_share for image in self.images)

    def sha256(self, bundle: Bundle) -> str:
        """Return the sum of the question and the bundle, in hexadecimal."""
        fit = f" {self.fit}" if self.fit else ""
        digest = hashlib.sha256(f"{bundle.sha256} {self.new_tokens} {self.prompt}{fit}".encode())
        for image in self.images:
            pixels = np.asarray(image)
            digest.update(f" {pixels.shape} ".encode() + pixels.tobytes())
        return digest.hexdigest()


def picture_files(files: Sequence[Path], manifest: Manifest) -> list[Path]:
    """Return the picture files of a question about `files`: for a policy, one file may be all cameras' frame.

    Raises `ImageError` for another number of files than a policy has cameras.
    """
    cameras = len(files) if manifest.policy is None else manifest.max_images
    if len(files) not in (1, cameras):
        raise ImageError(
            f"found {len(files)} pictures, and the policy has {counted(cameras, 'camera')}. Give one picture for "
            "each camera, or one for all."
        )
    return list(files) if len(files) == cameras else [*files] * cameras


def read_question(
    files: Sequence[Path],
    prompt: str,
    bundle: Bundle,
    limits: Mapping[str, int] = MappingProxyType({}),
    fit: Fit | None = None,
) -> GateQuestion:
    """Return the pictures in `files` and the question about them, for engines with the enforced `limits`.

    `fit` is that of `load_family`. Raises `ImageError`, `PromptError` for a question that is longer than the engines
    accept, and `UsageError` for a `fit` that the bundle's family does not have.
    """
    texts = [*[""] * len(files), prompt]
    check_texts(texts, len(files))
    family = load_family(bundle.manifest, fit)
    check_picture_count(bundle.manifest, None, len(files))
    images = [decoded(file, family) for file in files]
    most = limits.get("prompt_tokens")
    if most is not None:
        tokens = _text_tokens(bundle, texts, [*map(family.layout, images)])
        if tokens > most:
            policy = bundle.manifest.policy
            trained = policy.most_prompt_tokens if policy else None
            again = f", or build with --max-prompt {tokens}" if trained is None or tokens <= trained else ""
            raise PromptError(
                f"the {_noun(bundle)} '{prompt}' has {tokens} text tokens with its template, and the engines take "
                f"{most}. Give a shorter one (sinkprune check --prompt, sinkprune build --check-prompt){again}."
            )
    return GateQuestion(images, prompt, min(NEW_TOKENS, limits.get("new_tokens", NEW_TOKENS)), fit)


def check_prompt_limit(bundle: Bundle, most: int) -> None:
    """Raise `UsageError` if a limit of `most` text tokens has no room for a question of one letter."""
    policy, layout = bundle.manifest.policy, load_family(bundle.manifest).layout(Image.new("RGB", (224, 224)))
    question = "a"
    if policy is not None and policy.state_in_prompt:
        # The lowest numbers have the fewest digits.
        question = state_prompt(policy, question, np.full((1, 1, policy.state_dim), -1.0))
    least = _text_tokens(bundle, ["", question], [layout])
    if most < least:
        raise UsageError(
            f"--max-prompt is {most}, and the shortest {_noun(bundle)} has {least} text tokens with its template. "
            f"Give {least} or more."
        )


def _noun(bundle: Bundle) -> str:
    return "question" if bundle.manifest.policy is None else "instruction"


def _text_tokens(bundle: Bundle, texts: Sequence[str], layouts: Sequence[VisualLayout]) -> int:
    """Return the text tokens of a prompt about pictures of these layouts, with its chat template."""
    return PromptEncoder.of_bundle(bundle).encode(texts, [layout.texts for layout in layouts]).text_tokens


REFERENCE = "ort-cpu"
"""The backend that runs the graphs, in fp32."""
_COMPLETE, _LOGITS = "recording.json", "logits-{}.npy"
_IN, _OUT = "in.", "out."
# What a chat template adds to a question, generously.
_PROMPT_TOKENS = 512


class RecordedCall(NamedTuple):
    """The inputs and outputs of one call of a graph.

    The caches of a decoder segment are no inputs, and are outputs in a policy only: the new rows.
    """

    inputs: dict[str, Array]
    outputs: dict[str, Array]


class GateAnswer(NamedTuple):
    """A greedy answer, and the tokens that were kept for it."""

    method: str
    budget: str
    token_ids: list[int]
    text: str
    kept: list[list[int]]
    """For each picture, the tokens that reach the language model, then those left after each select."""


class GateChunk(NamedTuple):
    """A policy's chunk of actions, and the tokens that were kept for it."""

    method: str
    budget: str
    steps: int
    actions: list[list[float]]
    """[chunk][action_dim], as the expert gives them."""
    kept: list[list[int]]
    """As those of `GateAnswer`."""


Act = Callable[[GateQuestion, str, str], GateChunk]
"""Returns a policy's chunk for a question, a method and a budget; equal calls begin with the same noise."""
ACTS = Registry[Callable[[Bundle, Backend, BuiltEngines | None, Wrap | None], Act]]("sinkprune.gate")
"""What loads a policy for the gate, as `policy`."""


def load_act(bundle: Bundle, backend: Backend, built: BuiltEngines | None, wrap: Wrap | None) -> Act:
    """Load a policy's graphs, or the engines `built` from them; raises what `Policy.load` does."""
    return ACTS["policy"](bundle, backend, built, wrap)


class Recording:
    """A complete recording in a folder."""

    def __init__(self, folder: Path, bundle: Bundle, question: GateQuestion) -> None:
        """Open a folder that `record` wrote for this bundle and question. Raises `ValueError` for another one."""
        self._folder, self.bundle, self.question = folder, bundle, question
        stored = json.loads((folder / _COMPLETE).read_text(encoding="utf-8"))
        if stored["of"] != question.sha256(bundle):
            raise ValueError("the recording is of another question")
        self.answers = [GateAnswer(**answer) for answer in stored["answers"]]
        """The answers at every budget, the unpruned first; empty for a policy."""
        self.chunks = [GateChunk(**chunk) for chunk in stored["chunks"]]
        """A policy's chunks at every budget, the unpruned first."""

    def calls(self, graph: str) -> Iterator[RecordedCall]:
        """Yield every call of a graph, in order. The calls of a decoder are those of one answer after the other."""
        inputs: dict[str, Array] = {}
        for path in sorted((self._folder / graph).glob("*.npz")):
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            own, outputs = (
                {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
                for prefix in (_IN, _OUT)
            )
            # An input that is not in a file is that of the call before.
            inputs = {**inputs, **own}
            yield RecordedCall(inputs, outputs)

    def logits(self, number: int) -> Array:
        """Return [tokens,vocab] fp32, the logits of each token of the answer `number`."""
        return np.load(self._folder / _LOGITS.format(number), allow_pickle=False)


def record(bundle: Bundle, question: GateQuestion, folder: Path, progress: BuildProgress) -> Recording:
    """Run `bundle` on `question`, unpruned and at every budget, and store all calls below `folder`.

    A complete recording of the same bundle and question is reused. Raises what `Pipeline.generate` or `Policy.act`
    raises, `NumericsError` for a graph whose outputs are not finite, `EnginesError` for missing graphs, and
    `TooLittleMemoryError`.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        return Recording(folder, bundle, question)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    plans = [(method, budget) for method, plans in bundle.manifest.plans.items() for budget in plans]
    plans.insert(0, (next(iter(bundle.manifest.plans)), UNPRUNED))
    _check_graphs_and_memory(bundle, question, plans)
    backend, wrap = load_backend(REFERENCE, compute="fp32"), _Recorder(bundle, folder).wrap
    act = load_act(bundle, backend, None, wrap) if bundle.manifest.policy else None
    pipeline = None if act else Pipeline(bundle, backend, wrap=wrap, fit=question.fit)
    answers, chunks = [], []
    for number, (method, budget) in enumerate(plans):
        progress.graph(f"ONNX graphs, {budget}", number, len(plans), "running the graphs, by budget")
        if act is not None:
            chunks.append(act(question, method, budget)._asdict())
        if pipeline is not None:
            answer, logits = answer_question(pipeline, question, method, budget)
            np.save(folder / _LOGITS.format(number), logits, allow_pickle=False)
            answers.append(answer._asdict())
    sync_tree(folder)
    stored = {"of": question.sha256(bundle), "answers": answers, "chunks": chunks}
    (folder / _COMPLETE).write_text(json.dumps(stored), encoding="utf-8")
    return Recording(folder, bundle, question)


def answer_question(
    pipeline: Pipeline, question: GateQuestion, method: str, budget: str, on_token: Callable[[], None] = lambda: None
) -> tuple[GateAnswer, Array]:
    """Return a greedy answer, and [tokens,vocab] fp32, the logits of its tokens. Call `on_token` after each token."""
    logits = _LogitsObserver(on_token)
    answer = pipeline.generate(
        list(question.images),
        question.prompt,
        method=method,
        budget=budget,
        max_new_tokens=question.new_tokens,
        min_new_tokens=question.new_tokens,
        observer=logits,
    )
    kept = [tokens.tolist() for own in answer.images for tokens in kept_by_step(own)]
    return GateAnswer(method, budget, list(map(int, answer.token_ids)), answer.text, kept), np.stack(logits.rows)


def kept_by_step(own: Kept) -> list[Array]:
    """Return the tokens of a picture that are left after each step, numbered across its groups."""
    return [own.tokens, *(own.tokens[rows] for _, rows in sorted(own.after_stage.items()))]


class _LogitsObserver(Observer):
    def __init__(self, on_token: Callable[[], None]) -> None:
        self.rows: list[Array] = []
        self._on_token = on_token

    def chose(self, token: int, logits: Array) -> None:
        self.rows.append(np.array(logits, np.float32))
        self._on_token()


class _Recorder:
    """Stores the calls of every engine that it wraps."""

    def __init__(self, bundle: Bundle, folder: Path) -> None:
        self._graphs, self._folder = bundle.manifest.graphs, folder
        # A policy calls each segment once, and its expert reads caches: no later row would show a wrong cache.
        self._with_caches = bundle.manifest.reads_caches
        self._calls: Counter[str] = Counter()
        self._stored: set[bytes] = set()
        self._last: dict[str, dict[str, bytes]] = {}

    def wrap(self, graph: str, engine: Engine, backend: Backend) -> Engine:
        caches = cache_names(self._graphs[graph])
        own = [tensor.name for tensor in self._graphs[graph].inputs if tensor.name not in caches.values()]

        def recorded(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            outputs, given = engine(inputs), {name: backend.numpy(inputs[name]) for name in own}
            found = {name: backend.numpy(tensor) for name, tensor in outputs.items() if name not in caches}
            if self._with_caches:
                found |= {name: backend.numpy(outputs[name])[:, :, : given["hidden"].shape[1]] for name in caches}
            call = RecordedCall(given, found)
            # Budgets repeat a tower's call. A decoder's equal calls may differ in their caches.
            self._store(graph, call, once=not caches)
            return outputs

        return recorded

    def _store(self, graph: str, call: RecordedCall, *, once: bool) -> None:
        """Write a call to a new file; with `once`, only if no call with the same inputs is there."""
        for name, array in call.outputs.items():
            if not np.isfinite(array).all():
                raise NumericsError(
                    f"the ONNX graph '{graph}' gives values in '{name}' that are not finite, so nothing can be "
                    "compared with them. If the bundle is fp16, its values may exceed that type; export it with "
                    "--precision fp32."
                )
        sums = {
            name: hashlib.sha256(repr(array.shape).encode() + array.tobytes()).digest()
            for name, array in call.inputs.items()
        }
        digest = hashlib.sha256(graph.encode() + b"".join(sums.values())).digest()
        if once and digest in self._stored:
            return
        self._stored.add(digest)
        last, self._last[graph] = self._last.get(graph, {}), sums
        path = self._folder / graph / f"{self._calls[graph]:06}.npz"
        self._calls[graph] += 1
        path.parent.mkdir(parents=True, exist_ok=True)
        # A policy's expert reads the same caches in every step.
        changed = [name for name in call.inputs if sums[name] != last.get(name)]
        parts: dict[str, Any] = {_IN + name: call.inputs[name] for name in changed}
        np.savez(path, **parts | {_OUT + name: array for name, array in call.outputs.items()})


def _check_graphs_and_memory(bundle: Bundle, question: GateQuestion, plans: Sequence[tuple[str, str]]) -> None:
    """Raise `EnginesError` or `TooLittleMemoryError` before anything slow begins."""
    missing = [graph for graph, spec in bundle.manifest.graphs.items() if spec.file not in bundle.files]
    if missing:
        raise EnginesError(
            f"'{bundle.path}' holds graph '{missing[0]}' no more, and its calls were not recorded, so that engines "
            "cannot be compared with it. Export the bundle again."
        )
    manifest, family = bundle.manifest, load_family(bundle.manifest, question.fit)
    layouts = [*map(family.layout, question.images)]
    tokens = _PROMPT_TOKENS + question.new_tokens
    for method, budget in plans:
        rows = schedule(manifest, method, budget, layouts)
        memory = KNOWN[REFERENCE].memory
        need = running_need(manifest, memory, built=False, layouts=layouts, planned=rows, tokens=tokens)
        way_out = "check the engines with sinkprune-check where there is more, and build without --check here"
        need.check(f"running the graphs of '{bundle.path}' to compare engines with", available_bytes(), way_out)
