"""A bundle, loaded: images and prompts in, answers out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
from PIL import Image

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import Bundle, read_bundle, verify
from sinkprune.contract.engines_manifest import Limits, verify_engines
from sinkprune.contract.errors import ImageError, NumericsError, PromptError, PruningError, UsageError
from sinkprune.contract.manifest import CHAT_TEMPLATE, EMBEDDING, TOKENIZER
from sinkprune.contract.plans import Plan
from sinkprune.contract.precision import DTYPES
from sinkprune.contract.report import PARTS
from sinkprune.runtime.answer import Answer, Kept
from sinkprune.runtime.backends import Backend, load_backend
from sinkprune.runtime.backends.compatibility import BuiltEngines, open_engines
from sinkprune.runtime.chain import (
    Chain,
    Encoded,
    Images,
    KVCache,
    Prefill,
    decode_one_token,
    encode,
    kv_bytes,
    prefill,
    surviving_rows,
)
from sinkprune.runtime.clip import Shown
from sinkprune.runtime.context_length import Length, too_long
from sinkprune.runtime.embedding import Embedding
from sinkprune.runtime.families import load_family
from sinkprune.runtime.pictures import PictureLike, decoded, naming
from sinkprune.runtime.prompt import Prompt, PromptEncoder
from sinkprune.runtime.prompt_rows import PictureRows, PromptRows, prompt_rows
from sinkprune.runtime.sampling import Sampler
from sinkprune.runtime.stopwatch import Stopwatch

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Picture:
    """An image or a clip of a request."""

    source: PictureLike
    image: Image.Image | Shown
    plan: Plan | None


@dataclass(frozen=True)
class _Start:
    """A request whose first token is there."""

    clock: Stopwatch
    encoded: list[Encoded]
    prefill: Prefill
    rows: PromptRows
    sizes: list[Any]
    """Of the images, as the family takes them."""
    text_tokens: int
    token: int


class Pipeline:
    """A loaded bundle; every budget and the unpruned baseline run on the same engines."""

    def __init__(self, bundle: Bundle, backend: Backend, built: BuiltEngines | None = None) -> None:
        """Loads the bundle's graphs on `backend`, or the engines `built` from them."""
        manifest = bundle.manifest
        self.bundle, self.backend = bundle, backend
        self._limits = built.limits if built else None
        self.family = load_family(manifest)
        self._dtype = DTYPES[manifest.precision]
        self._prompts = PromptEncoder(bundle.file(TOKENIZER), bundle.file(CHAT_TEMPLATE), manifest.tokens)
        self._embedding = Embedding(bundle.file(EMBEDDING))
        self.chain = Chain(bundle, backend, self._dtype, built)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        backend: str = "ort-cpu",
        threads: int | None = None,
        engines: str | os.PathLike[str] | None = None,
        check_sums: bool = True,
    ) -> Pipeline:
        """Read the bundle at `path` and load it, or the `engines` that sinkprune-build made of it.

        `check_sums` compares every file with its sha256 first; sizes are compared in any case. Raises `BundleError`,
        `EnginesError` and `BackendError`.
        """
        bundle = read_bundle(path)
        built = open_engines(engines, bundle) if engines is not None else None
        # What is missing is told before the sums, which take their time.
        opened = load_backend(backend, threads, built)
        if check_sums:
            verify(bundle)
            if built is not None:
                verify_engines(built.engines)
        return cls(bundle, opened, built)

    def generate(
        self,
        image: PictureLike | Sequence[PictureLike],
        prompt: str | Sequence[str],
        *,
        on_text: Callable[[str], None] | None = None,
        **options: Any,
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
        image: PictureLike | Sequence[PictureLike],
        prompt: str | Sequence[str],
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

        Nothing runs, and nothing is checked, before the first piece is asked for.
        `image` is a Pillow image, a uint8 [height,width,3] array or a file, a `Clip` or a `VideoFile`, or a list of
        several. `prompt` stands
        behind the images; as a list of texts it stands around them: one text before each image and one behind the
        last. Stop tokens are ignored before `min_new_tokens`.

        Raises `ImageError`, `PromptError`, `BudgetError`, `PruningError`, `NumericsError`.
        """
        if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
            raise UsageError(f"max new tokens is {max_new_tokens}, expected a whole number of at least 1.")
        spec = self.bundle.manifest.plan(method, budget)
        sampler = Sampler(temperature, top_p, seed)
        pictures = self._pictures(image, method, budget)
        if spec is not None:
            self._load_plan(spec)

        start = self._start(pictures, prompt, sampler, method, max_new_tokens)
        # Before decoding grows the caches
        cache_bytes = kv_bytes(self.chain, start.prefill.cache)
        token, ids, steps, text = start.token, [start.token], [], ""
        while True:
            stopped = token in self.bundle.manifest.tokens.stop and len(ids) > min_new_tokens
            ended = stopped or len(ids) >= max_new_tokens
            piece = self._new_text(ids[:-1] if stopped else ids, text, final=ended)
            text += piece
            if piece:
                yield piece
            if ended:
                break
            token, ms = self._next_token(start.prefill.cache, token, sampler)
            ids.append(token)
            steps.append(ms)
        return Answer(
            text=text,
            token_ids=ids,
            finish="stop" if stopped else "length",
            method=method,
            budget=budget,
            prompt_tokens=start.text_tokens,
            visual_tokens=sum(encoded.norms.size for encoded in start.encoded),
            tokens_per_layer=[tokens - start.text_tokens for tokens in start.prefill.tokens_per_layer],
            kv_bytes=cache_bytes,
            ms=_timings(start.clock, steps),
            images=self._kept(start),
        )

    def encode(self, image: PictureLike) -> Encoded:
        """An image as the unpruned LLM receives it, with its tokens' norms and salience; raises `ImageError`."""
        inputs = self._preprocess(_Picture(image, decoded(image, self.family), None))
        return encode(self.chain, None, inputs, Stopwatch(self.backend))

    def _pictures(self, images: PictureLike | Sequence[PictureLike], method: str, budget: str) -> list[_Picture]:
        """The images, decoded, with the plan of each; raises `PromptError` for more than the bundle is made for."""
        sources: list[Any] = list(images) if isinstance(images, (list, tuple)) else [images]
        most = self._limits.images if self._limits else self.bundle.manifest.max_images
        if not 1 <= len(sources) <= most:
            raise PromptError(
                f"the prompt has {len(sources)} images, expected 1 to {most}. More must be asked for beforehand: "
                "sinkprune-export --max-images, and sinkprune-build --max-images where engines are built."
            )
        shown = [(source, decoded(source, self.family)) for source in sources]
        return [_Picture(source, image, self._plan(method, budget, source, image.size)) for source, image in shown]

    def _start(
        self,
        pictures: Sequence[_Picture],
        prompt: str | Sequence[str],
        sampler: Sampler,
        method: str,
        max_new_tokens: int,
    ) -> _Start:
        """Everything up to the first token: what TTFT measures."""
        clock = Stopwatch(self.backend)
        with clock.measure("ttft"):
            with clock.measure("preprocess"):
                inputs = [self._preprocess(picture) for picture in pictures]
                question = self._prompts.encode(prompt, len(pictures))
            self._check_length(question, pictures, method, max_new_tokens)
            encoded = []
            for picture, taken in zip(pictures, inputs, strict=True):
                encoded.append(encode(self.chain, picture.plan, taken, clock))
                _check_finite(encoded[-1])
            rows = self._rows(pictures, question, encoded)
            result = self._prefill(pictures, rows, encoded, clock)
            token = sampler(self.backend.numpy(result.logits)[0])
        sizes = [picture.image.size for picture in pictures]
        return _Start(clock, encoded, result, rows, sizes, question.text_tokens, token)

    def _plan(self, method: str, budget: str, source: PictureLike, size: Any) -> Plan | None:
        """The plan for an image or clip of `size`."""
        most = self.bundle.manifest.most_visual_tokens
        with naming(source):
            tokens = self.family.visual_tokens(size)
            if tokens > most:
                raise ImageError(
                    f"the image has {size[0]}x{size[1]} pixels, which make {tokens} visual tokens; this bundle's "
                    f"graphs take up to {most}. Scale it down, or export again with a larger --max-pixels."
                )
            groups = self.family.groups(size)
        return self.bundle.manifest.plan_for(method, budget, tokens, groups)

    def _preprocess(self, picture: _Picture) -> dict[str, Array]:
        with naming(picture.source):
            inputs = self.family.preprocess(picture.image)
        return {
            name: array.astype(self._dtype) if np.issubdtype(array.dtype, np.floating) else array
            for name, array in inputs.items()
        }

    def _rows(self, pictures: Sequence[_Picture], question: Prompt, encoded: Sequence[Encoded]) -> PromptRows:
        """Text and images in their places."""
        images = [
            PictureRows(picture.image.size, *self._image_rows(picture, features))
            for picture, features in zip(pictures, encoded, strict=True)
        ]
        return prompt_rows(self.family, self._embedding, question.texts, images)

    def _image_rows(self, picture: _Picture, encoded: Encoded) -> tuple[Array, Array]:
        """The rows [V,d] of an image, and the token [V] each stands for; -1 is the end of a line of the unpruned."""
        if picture.plan is not None:
            return encoded.embeddings, _source_tokens(encoded)
        size: Any = picture.image.size
        tokens = self.family.unpruned_rows(size)
        rows = encoded.embeddings[tokens]
        if self.family.between_rows:
            rows[tokens < 0] = self._embedding.named(self.family.between_rows)
        return rows, tokens

    def _prefill(
        self, pictures: Sequence[_Picture], rows: PromptRows, encoded: Sequence[Encoded], clock: Stopwatch
    ) -> Prefill:
        """All rows through the chain."""
        plan = pictures[0].plan
        images = Images(rows.picture, [picture.plan.counts.stages if picture.plan else () for picture in pictures])
        result = prefill(
            self.chain,
            plan,
            rows.hidden,
            rows.visual,
            rows.text,
            clock,
            positions=rows.positions,
            norms=encoded[0].norms,
            images=images,
        )
        left = result.tokens_per_layer[-1] - (len(rows.hidden) - len(rows.visual))
        if plan is not None and left == sum(features.norms.size for features in encoded):
            raise PruningError(
                f"pruning was asked for and nothing was pruned: the image has {left} visual tokens and the budget "
                f"keeps as many. Use budget '{UNPRUNED}', or a smaller one."
            )
        return result

    def _next_token(self, cache: KVCache, token: int, sampler: Sampler) -> tuple[int, float]:
        start = time.perf_counter()
        logits = decode_one_token(self.chain, cache, self._embedding([token])[0])
        chosen = sampler(self.backend.numpy(logits)[0])
        return chosen, (time.perf_counter() - start) * 1e3

    def _new_text(self, ids: list[int], text: str, *, final: bool) -> str:
        """What `ids` say beyond `text`; half a character waits for its other half unless nothing more comes."""
        decoded: str = self._prompts.tokenizer.decode(ids, skip_special_tokens=True)
        return "" if decoded.endswith("\ufffd") and not final else decoded[len(text) :]

    def _load_plan(self, plan: Plan) -> None:
        for graph in filter(None, [plan.sanitizer, *plan.select_after.values()]):
            self.chain.plan_engine(graph)

    def _check_length(self, question: Prompt, pictures: Sequence[_Picture], method: str, new_tokens: int) -> None:
        text, visual = question.text_tokens, sum(self._rows_of(picture) for picture in pictures)
        _check_limits(self._limits, text, new_tokens)
        limit = self.bundle.manifest.language_model.max_positions
        if text + visual + new_tokens > limit:
            raise too_long(
                Length(text, visual, new_tokens, limit),
                self._kept_by_budget(method, pictures),
                self._way_out(pictures),
            )

    def _kept_by_budget(self, method: str, pictures: Sequence[_Picture]) -> dict[str, int]:
        """How many rows of all pictures each budget leaves in front of the first layer."""
        kept = {}
        for name in self.bundle.manifest.plans[method]:
            plans = [self._plan(method, name, picture.source, picture.image.size) for picture in pictures]
            kept[name] = sum(plan.kept for plan in plans if plan)
        return kept

    def _way_out(self, pictures: Sequence[_Picture]) -> str:
        """How pictures would have fewer tokens."""
        by_size = bool(self.family.vision_sizes(self.bundle.manifest.most_visual_tokens, groups=1))
        if any(isinstance(picture.image, Shown) for picture in pictures):
            return "Give fewer or smaller frames, or export again with a smaller --max-frames or --max-pixels."
        fewer = "fewer images" if len(pictures) > 1 else ""
        if by_size:
            given = f"{fewer} or smaller ones" if fewer else "a smaller image"
            return f"Give {given}, or export again with a smaller --max-pixels."
        return f"Give {fewer}." if fewer else "Ask for fewer new tokens."

    def _rows_of(self, picture: _Picture) -> int:
        """How many rows an image has in front of the first layer."""
        size: Any = picture.image.size
        if picture.plan is None:
            return len(self.family.unpruned_rows(size))
        return picture.plan.kept

    def _kept(self, start: _Start) -> tuple[Kept, ...]:
        survivors, kept = surviving_rows(self.chain, start.prefill), []
        for number, encoded in enumerate(start.encoded):
            own = start.rows.visual[start.rows.picture == number]
            after_stage = {layer: np.intersect1d(rows, own) - own[0] for layer, rows in survivors.items()}
            norms, salience = (x.reshape(len(encoded.kept_index), -1) for x in (encoded.norms, encoded.salience))
            kept.append(Kept(start.sizes[number], encoded.kept_index, norms, salience, after_stage))
        return tuple(kept)


def _source_tokens(encoded: Encoded) -> Array:
    """[V]: the token each row of `encoded` stands for, counted through all groups."""
    groups = len(encoded.kept_index)
    tokens = encoded.norms.size // groups
    source: Array = (encoded.kept_index + tokens * np.arange(groups)[:, None]).ravel()
    return source


def _timings(clock: Stopwatch, steps: list[float]) -> dict[str, float | None]:
    """The parts of `sinkprune.contract.report.PARTS`; `steps` are the decode steps' milliseconds."""
    ms = clock.ms()
    timings: dict[str, float | None] = {part: ms.get(part, 0.0) for part in PARTS}
    timings["per_token"] = sum(steps) / len(steps) if steps else None
    timings["latency"] = ms["ttft"] + sum(steps)
    return timings


def _check_limits(limits: Limits | None, text: int, new_tokens: int) -> None:
    """Refuse a request beyond what the engines were built for; graphs have no limits."""
    if limits is None:
        return
    for what, asked, most, flag in (
        ("text tokens in the prompt", text, limits.prompt_tokens, "--max-prompt"),
        ("new tokens", new_tokens, limits.new_tokens, "--max-new-tokens"),
    ):
        if asked > most:
            raise PromptError(
                f"{asked} {what} are more than the {most} the engines were built for. Ask for less, or build them "
                f"again with sinkprune-build {flag} {asked}."
            )


def _check_finite(encoded: Encoded) -> None:
    if not (np.isfinite(encoded.norms).all() and np.isfinite(encoded.salience).all()):
        raise NumericsError(
            "the vision tower gave norms or salience that are not finite, so no token can be chosen by them. If the "
            "bundle is fp16, its values may exceed that type; export it with --precision fp32."
        )
