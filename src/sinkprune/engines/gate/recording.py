"""What the ONNX graphs of a bundle make of a picture and a question: each graph's calls, and the answers.

Calls lie in files, so that a build may remove a graph and its weights, and goes on where it was killed; no more than
one call of one graph is in memory at a time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.errors import EnginesError, NumericsError
from sinkprune.contract.files.system_calls import sync_tree
from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import schedule
from sinkprune.contract.system.memory_need import running_need
from sinkprune.contract.system.system_memory import available_bytes
from sinkprune.engines.gate.question import Question
from sinkprune.engines.progress import BuildProgress
from sinkprune.runtime.backends import Backend, Engine, Tensor, load_backend
from sinkprune.runtime.backends.known import KNOWN
from sinkprune.runtime.backends.kv_cache import cache_names
from sinkprune.runtime.families import load_family
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.answer import Kept
from sinkprune.runtime.steps.observer import Observer
from sinkprune.runtime.steps.pictures import layout_of

REFERENCE = "ort-cpu"
"""The backend that runs the graphs, in fp32."""
_WHOLE = "recording.json"
_IN, _OUT = "in.", "out."
# What a chat template puts around a question, generously.
_PROMPT_TOKENS = 512


class Call(NamedTuple):
    """One call of a graph; of a decoder segment without caches."""

    inputs: dict[str, Array]
    outputs: dict[str, Array]


class Said(NamedTuple):
    """An answer, and what it was made of."""

    method: str
    budget: str
    token_ids: list[int]
    text: str
    kept: list[list[int]]
    """The tokens that reached the language model, and those that were left behind each select; of each picture."""


class Recording:
    """What was recorded, in the folder it lies in."""

    def __init__(self, folder: Path) -> None:
        """Opens what `record` wrote."""
        self._folder = folder
        told = json.loads((folder / _WHOLE).read_text(encoding="utf-8"))
        self.answers = [Said(**said) for said in told["answers"]]
        """Those of every budget, the unpruned first."""

    def calls(self, graph: str) -> Iterator[Call]:
        """Every call of the graph of that name, in their order; of a decoder's each answer's own, one by one."""
        for path in sorted((self._folder / graph).glob("*.npz")):
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            yield Call(_named(arrays, _IN), _named(arrays, _OUT))

    def logits(self, number: int) -> Array:
        """[tokens,vocab] fp32: what each token of the answer of that number was chosen by."""
        logits: Array = np.load(_logits_file(self._folder, number), allow_pickle=False)
        return logits


def record(bundle: Bundle, question: Question, folder: Path, progress: BuildProgress) -> Recording:
    """Run `bundle` on `question`, unpruned and at every budget, and keep all calls below `folder`.

    What lies there of the same bundle and question is taken up. Raises what asking raises, `NumericsError` for a
    graph that gives what is not finite, `EnginesError` where graphs are missing, and `TooLittleMemoryError`.
    """
    key = question.sha256(bundle)
    if _is_of(folder, key):
        return Recording(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    asked = [(method, budget) for method, plans in bundle.manifest.plans.items() for budget in plans]
    asked.insert(0, (next(iter(bundle.manifest.plans)), UNPRUNED))
    _check(bundle, question, asked)
    recorder = _Recorder(bundle, folder)
    pipeline = Pipeline(bundle, load_backend(REFERENCE, compute="fp32"), wrap=recorder.wrap)
    answers = []
    for number, (method, budget) in enumerate(asked):
        progress.graph(f"ONNX graphs, {budget}", number, len(asked))
        said, logits = ask(pipeline, question, method, budget)
        np.save(_logits_file(folder, number), logits, allow_pickle=False)
        answers.append(said)
    told = {"of": key, "answers": [said._asdict() for said in answers]}
    sync_tree(folder)
    (folder / _WHOLE).write_text(json.dumps(told), encoding="utf-8")
    return Recording(folder)


def ask(pipeline: Pipeline, question: Question, method: str, budget: str) -> tuple[Said, Array]:
    """A greedy answer, and the logits [tokens,vocab] its tokens were chosen by."""
    watched = _Logits()
    answer = pipeline.generate(
        list(question.images),
        question.prompt,
        method=method,
        budget=budget,
        max_new_tokens=question.new_tokens,
        min_new_tokens=question.new_tokens,
        observer=watched,
    )
    kept = [tokens.tolist() for own in answer.images for tokens in _kept(own)]
    return Said(method, budget, list(map(int, answer.token_ids)), answer.text, kept), np.stack(watched.logits)


def _kept(own: Kept) -> list[Array]:
    """The tokens of a picture that are left at each step, counted through its groups."""
    groups, tokens = own.norms.shape
    first = (own.index + tokens * np.arange(groups)[:, None]).ravel()
    return [first, *(first[rows] for _, rows in sorted(own.after_stage.items()))]


class _Logits(Observer):
    """Keeps the logits of every token."""

    def __init__(self) -> None:
        self.logits: list[Array] = []

    def chose(self, token: int, logits: Array) -> None:
        self.logits.append(np.array(logits, np.float32))


class _Recorder:
    """Puts itself around every engine and writes down its calls."""

    def __init__(self, bundle: Bundle, folder: Path) -> None:
        self._graphs, self._folder = bundle.manifest.graphs, folder
        self._numbers: Counter[str] = Counter()
        self._known: set[bytes] = set()

    def wrap(self, graph: str, engine: Engine, backend: Backend) -> Engine:
        """`engine`, which is recorded; a `sinkprune.runtime.pipeline.Wrap`."""

        def recorded(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            outputs = engine(inputs)
            caches = cache_names(self._graphs[graph])
            own = [tensor.name for tensor in self._graphs[graph].inputs if tensor.name not in caches.values()]
            self._write(
                graph,
                {name: backend.numpy(inputs[name]) for name in own},
                {name: backend.numpy(tensor) for name, tensor in outputs.items() if name not in caches},
                once=not caches,
            )
            return outputs

        return recorded

    def _write(self, graph: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array], *, once: bool) -> None:
        """Write a call; one that may be known `once` is not written again, as a tower's at every budget."""
        for name, array in outputs.items():
            if not np.isfinite(array).all():
                raise NumericsError(
                    f"the ONNX graph '{graph}' gives values in '{name}' that are not finite, so nothing can be "
                    "compared with them. If the bundle is fp16, its values may exceed that type; export it with "
                    "--precision fp32."
                )
        digest = hashlib.sha256(graph.encode() + b"".join(array.tobytes() for array in inputs.values())).digest()
        if once and digest in self._known:
            return
        self._known.add(digest)
        path = self._folder / graph / f"{self._numbers[graph]:06}.npz"
        self._numbers[graph] += 1
        path.parent.mkdir(parents=True, exist_ok=True)
        parts: dict[str, Any] = {_IN + name: array for name, array in inputs.items()}
        np.savez(path, **parts | {_OUT + name: array for name, array in outputs.items()})


def _check(bundle: Bundle, question: Question, asked: Sequence[tuple[str, str]]) -> None:
    """Refuse what is known not to run before anything slow begins."""
    gone = [graph for graph, spec in bundle.manifest.graphs.items() if spec.file not in bundle.files]
    if gone:
        raise EnginesError(
            f"'{bundle.path}' holds graph '{gone[0]}' no more, and what it gave was not recorded, so that engines "
            "cannot be compared with it. Export the bundle again."
        )
    manifest, family = bundle.manifest, load_family(bundle.manifest)
    layouts = [layout_of(image, image, family, manifest) for image in question.images]
    for method, budget in asked:
        rows = schedule(manifest, method, budget, layouts)
        tokens = _PROMPT_TOKENS + question.new_tokens
        need = running_need(manifest, KNOWN[REFERENCE].memory, built=False, layouts=layouts, rows=rows, tokens=tokens)
        way_out = "check the engines with sinkprune-check where there is more, and build without --check here"
        need.check(f"running the graphs of '{bundle.path}' to compare engines with", available_bytes(), way_out)


def _is_of(folder: Path, key: str) -> bool:
    """Whether a whole recording of what has this key lies in `folder`."""
    try:
        return bool(json.loads((folder / _WHOLE).read_text(encoding="utf-8"))["of"] == key)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _logits_file(folder: Path, number: int) -> Path:
    return folder / f"logits-{number}.npy"


def _named(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
