"""A bundle, loaded: images and prompts in, answers out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from sinkprune.budgets import UNPRUNED
from sinkprune.bundle import CHAT_TEMPLATE, EMBEDDING, TOKENIZER, Bundle, Plan, read_bundle, verify
from sinkprune.errors import ImageError, NumericsError, PromptError, PruningError, UsageError
from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.chain import (
    Chain,
    Encoded,
    KVCache,
    Prefill,
    decode_one_token,
    encode,
    kv_bytes,
    prefill,
    surviving_rows,
)
from sinkprune.runtime.embedding import Embedding
from sinkprune.runtime.families import load_family
from sinkprune.runtime.images import read_image, to_rgb
from sinkprune.runtime.prompt import Prompt, PromptEncoder
from sinkprune.runtime.sampling import Sampler
from sinkprune.runtime.stopwatch import Stopwatch

Array = np.ndarray[Any, Any]
ImageLike = Image.Image | Array | str | os.PathLike[str]

_DTYPES: dict[str, np.dtype[Any]] = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16)}


@dataclass(frozen=True)
class Kept:
    """What became of an image's visual tokens. Indices are into the N tokens of the tower's grid."""

    index: Array
    """[G,n0] the tokens the LLM received; row 0 of a plan with a sink stands for all outliers."""
    norms: Array
    """[G,N] token norms."""
    salience: Array
    """[G,N] token salience."""
    after_stage: dict[int, Array]
    """By pruning layer: the places in `index` (flattened) that survived it, ascending."""


@dataclass(frozen=True)
class Answer:
    """An answer and how it came about."""

    text: str
    token_ids: list[int]
    finish: str
    """`stop` (the model ended it) or `length` (max_new_tokens did)."""
    method: str
    budget: str
    prompt_tokens: int
    """Text tokens of the rendered prompt; visual tokens are counted apart."""
    visual_tokens: int
    """Visual tokens of the image before anything is dropped."""
    tokens_per_layer: list[int]
    """Visual tokens each decoder layer ran on."""
    kv_bytes: int
    """Bytes of keys and values after the prefill."""
    ms: dict[str, float | None]
    """preprocess, vision, sanitizer, projector, prefill, select, ttft, per_token (None for one token), latency."""
    kept: Kept


class Pipeline:
    """A loaded bundle; every budget and the unpruned baseline run on the same engines."""

    def __init__(self, bundle: Bundle, backend: str = "ort-cpu", threads: int | None = None) -> None:
        manifest = bundle.manifest
        self.bundle = bundle
        self.backend = load_backend(backend, threads)
        self._family = load_family(manifest)
        self._dtype = _DTYPES[manifest.precision]
        self._prompts = PromptEncoder(bundle.file(TOKENIZER), bundle.file(CHAT_TEMPLATE), manifest.tokens)
        self._embedding = Embedding(bundle.file(EMBEDDING))
        self._chain = Chain(bundle, self.backend, self._dtype)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        backend: str = "ort-cpu",
        threads: int | None = None,
        check_sums: bool = True,
    ) -> Pipeline:
        """Read the bundle at `path` and load its engines.

        `check_sums` compares every file with its sha256 first; sizes are compared in any case. Raises `BundleError`
        and `BackendError`.
        """
        bundle = read_bundle(path)
        if check_sums:
            verify(bundle)
        return cls(bundle, backend, threads)

    @property
    def family(self) -> Any:
        """The bundle's family, for its token boxes and FLOP counts."""
        return self._family

    def generate(
        self, image: ImageLike, prompt: str, *, on_text: Callable[[str], None] | None = None, **options: Any
    ) -> Answer:
        """The whole answer; takes `stream`'s options. `on_text` is given each piece of text as it comes."""
        pieces = self.stream(image, prompt, **options)
        while True:
            try:
                piece = next(pieces)
            except StopIteration as done:
                answer: Answer = done.value
                return answer
            if on_text is not None:
                on_text(piece)

    def stream(
        self,
        image: ImageLike,
        prompt: str,
        *,
        budget: str = UNPRUNED,
        method: str = "sinkpruner",
        max_new_tokens: int = 128,
        min_new_tokens: int = 0,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Generator[str, None, Answer]:
        """The answer's text, piece by piece; the generator's return value is the `Answer`.

        `image` is a Pillow image, a uint8 [height,width,3] array or a file. Stop tokens are ignored before
        `min_new_tokens`. Raises `ImageError`, `PromptError`, `BudgetError`, `PruningError`, `NumericsError`.
        """
        if max_new_tokens < 1:
            raise UsageError(f"max new tokens is {max_new_tokens}, expected at least 1.")
        plan = self.bundle.manifest.plan(method, budget)
        sampler = Sampler(temperature, top_p, seed)
        decoded = read_image(image) if isinstance(image, (str, os.PathLike)) else to_rgb(image)
        if plan is not None:
            self._load_plan(plan)

        clock = Stopwatch(self.backend.synchronize)
        start = time.perf_counter()
        with clock.measure("preprocess"):
            inputs = self._preprocess(decoded, image)
            question = self._prompts.encode(prompt)
        self._check_length(question, plan, max_new_tokens)
        encoded = encode(self._chain, plan, inputs, clock)
        _check_finite(encoded)
        result, visual = self._prefill(plan, question, encoded, clock)
        token = sampler(self.backend.numpy(result.logits)[0])
        clock.ms["ttft"] = (time.perf_counter() - start) * 1e3
        # Before decoding grows the caches
        cache_bytes = kv_bytes(self._chain, result.cache)

        ids, steps, text = [token], [], ""
        while True:
            stopped = token in self.bundle.manifest.tokens.stop and len(ids) > min_new_tokens
            piece = self._new_text(ids[:-1] if stopped else ids, text, final=stopped or len(ids) == max_new_tokens)
            text += piece
            if piece:
                yield piece
            if stopped or len(ids) == max_new_tokens:
                break
            token, ms = self._next_token(result.cache, token, sampler)
            ids.append(token)
            steps.append(ms)

        names = ("preprocess", "vision", "sanitizer", "projector", "prefill", "select", "ttft")
        timings: dict[str, float | None] = {name: clock.ms.get(name, 0.0) for name in names}
        timings["per_token"] = sum(steps) / len(steps) if steps else None
        timings["latency"] = clock.ms["ttft"] + sum(steps)
        text_tokens = len(question.before) + len(question.after)
        return Answer(
            text=text,
            token_ids=ids,
            finish="stop" if stopped else "length",
            method=method,
            budget=budget,
            prompt_tokens=text_tokens,
            visual_tokens=encoded.norms.size,
            tokens_per_layer=[tokens - text_tokens for tokens in result.tokens_per_layer],
            kv_bytes=cache_bytes,
            ms=timings,
            kept=self._kept(encoded, result, visual),
        )

    def _preprocess(self, decoded: Image.Image, source: ImageLike) -> dict[str, Array]:
        try:
            inputs = self._family.preprocess(decoded)
        except ImageError as error:
            if isinstance(source, (str, os.PathLike)):
                raise ImageError(f"'{source}': {error}") from error
            raise
        return {name: array.astype(self._dtype) for name, array in inputs.items()}

    def _prefill(
        self, plan: Plan | None, question: Prompt, encoded: Encoded, clock: Stopwatch
    ) -> tuple[Prefill, Array]:
        """[before ; image ; after] through the chain; also returns the rows of the image."""
        start, count = len(question.before), len(encoded.embeddings)
        rows = np.concatenate([self._embedding(question.before), encoded.embeddings, self._embedding(question.after)])
        visual = np.arange(start, start + count)
        text = np.arange(start + count, len(rows))
        result = prefill(self._chain, plan, rows, visual, text, clock)
        left = result.tokens_per_layer[-1] - (len(rows) - count)
        if plan is not None and left == encoded.norms.size:
            raise PruningError(
                f"pruning was asked for and nothing was pruned: the image has {left} visual tokens and the budget "
                f"keeps as many. Use budget '{UNPRUNED}', or a smaller one."
            )
        return result, visual

    def _next_token(self, cache: KVCache, token: int, sampler: Sampler) -> tuple[int, float]:
        start = time.perf_counter()
        logits = decode_one_token(self._chain, cache, self._embedding([token])[0])
        chosen = sampler(self.backend.numpy(logits)[0])
        return chosen, (time.perf_counter() - start) * 1e3

    def _new_text(self, ids: list[int], text: str, *, final: bool) -> str:
        """What `ids` say beyond `text`; half a character waits for its other half unless nothing more comes."""
        decoded: str = self._prompts.tokenizer.decode(ids, skip_special_tokens=True)
        return "" if decoded.endswith("\ufffd") and not final else decoded[len(text) :]

    def _load_plan(self, plan: Plan) -> None:
        for graph in filter(None, [plan.sanitizer, *plan.select_after.values()]):
            self._chain.plan_engine(graph)

    def _check_length(self, question: Prompt, plan: Plan | None, new_tokens: int) -> None:
        text = len(question.before) + len(question.after)
        visual = plan.counts.kept if plan else self._family.visual_tokens
        limit = self.bundle.manifest.language_model.max_positions
        if text + visual + new_tokens > limit:
            room = limit - text - visual
            way_out = f" or ask for at most {room} new tokens" if room > 0 else ""
            raise PromptError(
                f"the prompt is too long: {text} text tokens, {visual} visual tokens and up to {new_tokens} new "
                f"tokens exceed the model's {limit} positions. Shorten the prompt{way_out}."
            )

    def _kept(self, encoded: Encoded, result: Prefill, visual: Array) -> Kept:
        survivors = surviving_rows(self._chain, result)
        after_stage = {layer: np.intersect1d(rows, visual) - visual[0] for layer, rows in survivors.items()}
        return Kept(encoded.kept_index, encoded.norms, encoded.salience, after_stage)


def _check_finite(encoded: Encoded) -> None:
    if not (np.isfinite(encoded.norms).all() and np.isfinite(encoded.salience).all()):
        raise NumericsError(
            "the vision tower gave norms or salience that are not finite, so no token can be chosen by them. If the "
            "bundle is fp16, its values may exceed that type; export it with --precision fp32."
        )
