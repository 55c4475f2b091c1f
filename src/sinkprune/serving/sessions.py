"""What requests about the same pictures share: towers and the rows of the decoder's first segments.

Rows of a prompt attend to earlier rows only. So until the first select, no row of a picture depends on the question
that follows it. A select depends on the question, and runs anew for each request. It drops no text. So rows of the
text before the first picture depend on neither, in all segments.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from os import urandom
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from sinkprune.contract.budgets import Plan
from sinkprune.contract.checks import WholeNumber, check_type, checks_options
from sinkprune.contract.errors import UsageError
from sinkprune.contract.flops import prefill_flops
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Backend, Tensor
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.families import TowerInput
from sinkprune.runtime.hooks import NOBODY, Observer, Restored, Rows
from sinkprune.runtime.loading import StaysInProcess
from sinkprune.runtime.media.frame import Frame, Picture, SampledFrames
from sinkprune.runtime.media.stored_pixels import strips
from sinkprune.runtime.pipeline import Answering, Pipeline
from sinkprune.runtime.steps.chain import Chain, EncodedPicture, TowerOutput, run_tower
from sinkprune.runtime.steps.decoding import PromptRun, kv_bytes
from sinkprune.runtime.steps.pictures import PictureLike
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.stream import Stream
from sinkprune.runtime.text.prompt import Text

MAX_BYTES = 256 << 20
"""The default size of a session's memory."""
_BYTES = WholeNumber("max_bytes", 0, 1 << 50)
WORTH_FLOPS = 10**8
"""The least FLOPs of text rows that are worth storing. Restoring rows takes some 0.3 ms, as does so much work."""
_LAST = b"last picture %d"
"""The key of the content and the digest of the last request's picture in this place."""
_MOST_COMPARED = 1 << 24
"""The most pixels of a picture that is compared. Pixels of larger ones would displace what is worth more."""


def _picture_parts(picture: Picture) -> Iterator[bytes]:
    """Yield what a model sees of a picture: its size, the times of a clip's frames, and the pixels of each."""
    frames = picture.frames if isinstance(picture, SampledFrames) else [picture]
    yield repr((picture.size, getattr(picture, "seconds", None), [frame.size for frame in frames])).encode()
    for frame in frames:
        if isinstance(frame, Frame):
            # Pixels on a GPU are not read: such a frame is none that was seen before.
            yield frame.rgb_bytes() if frame.on_host else urandom(32)
        else:
            yield from (strip.tobytes() for _, strip in strips(frame))


def _digest_of(parts: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


class SessionSegment(NamedTuple):
    """The first rows of a prompt in one decoder segment, as `StoredRows` describes them."""

    rows: int
    """How many rows of what is stored belong to the prompt."""
    saved: Any
    """The keys and values, as `Decoder.save` returned them."""
    scored: Mapping[str, Array]
    """The segment's `SCORED` outputs, on the host; empty where no select follows."""

    def joined(self, backend: Backend, outputs: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
        """Return the `SCORED` outputs of all `rows` of the prompt; `outputs` are those of later rows, or empty."""
        stored = {name: backend.tensor(array[..., : self.rows, :]) for name, array in self.scored.items()}
        if not outputs:
            return stored
        joined, first, later = {}, np.arange(self.rows), np.arange(rows - self.rows)
        for name, array in self.scored.items():
            # On the device, where nothing waits: the stored rows of each head, then its later ones.
            *heads, _, width = array.shape
            head = np.arange(prod(heads))[:, None]
            order = np.hstack([head * len(first) + first, head.size * len(first) + head * len(later) + later])
            joined[name] = backend.join([stored[name], outputs[name]], order.ravel(), (*heads, rows, width))
        return joined


class PrefixKey(NamedTuple):
    """What the rows of a prompt, up to the end of its last picture, depend on before the first select."""

    pictures: tuple[bytes, ...]
    """`PrefixCache.digest` of each picture."""
    texts: tuple[tuple[int, ...], ...]
    """The token ids before each part of a picture."""
    sanitizer: str | None
    """The sum of the plan's sanitizer; None without a sanitizer. Budgets with equal sanitizers share rows."""
    pruned: bool
    """Whether a plan runs: an unpruned prompt may have further rows."""
    segments: int
    """The number of decoder segments before the first select."""
    question: tuple[int, ...]
    """The token ids of the question, if the sanitizer reads it."""


class LeadKey(NamedTuple):
    """What the rows of a text before the first picture depend on."""

    text: tuple[int, ...]
    """Its token ids; none where its rows are not worth storing."""
    selects: tuple[int, ...]
    """The decoder segments that a select follows."""


@dataclass(frozen=True)
class Prefix:
    """The rows of an earlier prompt, after the decoder segments before the first select."""

    encoded: tuple[EncodedPicture, ...]
    """The prompt's pictures."""
    text: tuple[int, ...]
    """The token ids after the last picture."""
    length: int
    """The number of rows up to the end of the last picture."""
    saved: tuple[Any, ...]
    """The keys and values of each segment, as `Decoder.save` returned them."""
    scored: Mapping[str, Array]
    """The last segment's `SCORED` outputs, on the host; empty where no select follows."""

    def same(self, text: Sequence[int]) -> int:
        """Return how many first ids `text` has in common with the prefix's.

        Without a select, its last id does not count: the prompt's last row runs again, because its logits are needed.
        """
        most = min(len(self.text), len(text) if self.scored else len(text) - 1)
        return next((number for number in range(most) if self.text[number] != text[number]), most)


class PrefixCache:
    """Stored towers, prefixes and texts of up to `max_bytes`. What was used least recently is dropped first.

    Threads may share it. A cache of 0 bytes stores nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._most, self._bytes, self.stores_any = max_bytes, 0, max_bytes > 0
        self._stored: OrderedDict[bytes | PrefixKey | LeadKey, tuple[Any, int]] = OrderedDict()
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """The bytes of all that is stored."""
        return self._bytes

    def digest(self, place: int, picture: Picture, plan: Plan | None = None) -> bytes:
        """Return the digest of a picture, as the vision tower of `plan` sees it.

        `place` is its place among the request's pictures.
        """
        frames = picture.frames if isinstance(picture, SampledFrames) else [picture]
        if sum(prod(frame.size) for frame in frames) > _MOST_COMPARED:
            digest = _digest_of(_picture_parts(picture))
        else:
            # The next question is mostly about the same pictures, and to compare them is faster than a digest.
            content = (*_picture_parts(picture),)
            last: tuple[tuple[bytes, ...], bytes] | None = self.get(_LAST % place)
            if last is None or last[0] != content:
                last = content, _digest_of(content)
                self.put(_LAST % place, last, sum(map(len, content)))
            digest = last[1]
        seen = (plan.picture_share, plan.tower) if plan is not None else (None, None)
        return digest if seen == (None, None) else digest + repr(seen).encode()

    def stores(self, key: PrefixKey, text: Sequence[int]) -> bool:
        """Return whether the prefix of a prompt is worth storing; `text` are its ids after the last picture.

        A stored prefix stays, unless the new prompt has half of its text or more: then it is a conversation's next
        turn.
        """
        found: Prefix | None = self.get(key)
        if found is None:
            return self.stores_any
        same = found.same(text)
        return same < len(text) - 1 and 2 * same >= len(found.text)

    def get(self, key: bytes | PrefixKey | LeadKey) -> Any:
        """Return what is stored by this key, or None."""
        with self._lock:
            if key not in self._stored:
                return None
            self._stored.move_to_end(key)
            return self._stored[key][0]

    def put(self, key: bytes | PrefixKey | LeadKey, value: Any, nbytes: int) -> None:
        """Store a picture's tower by its digest, a `Prefix`, or a text's rows, in the place of what is stored."""
        with self._lock:
            self._bytes -= self._stored.pop(key, (None, 0))[1]
            if nbytes <= self._most:
                self._stored[key] = value, nbytes
                self._bytes += nbytes
            while self._bytes > self._most:
                _, (_, freed) = self._stored.popitem(last=False)
                self._bytes -= freed


class SessionRows(Rows):
    """The rows of one request of a session, with what its `cache` has of them."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache, self._digests, self._known = cache, list[bytes](), list[TowerOutput | None]()
        self._key: PrefixKey
        self._lead_key: LeadKey
        self._new_lead = False

    def knows(self, place: int, picture: Picture, plan: Plan | None) -> bool:
        self._digests.append(self._cache.digest(place, picture, plan))
        self._known.append(self._cache.get(self._digests[-1]))
        return self._known[-1] is not None

    def towers(
        self, chain: Chain, plan: Plan | None, pictures: Sequence[TowerInput], clock: Stopwatch
    ) -> list[TowerOutput]:
        # An earlier request about the same picture may have run since.
        known = [tower or self._cache.get(own) for tower, own in zip(self._known, self._digests, strict=True)]
        towers = [
            run_tower(chain, own.inputs, clock, plan) if tower is None else tower
            for own, tower in zip(pictures, known, strict=True)
        ]
        for digest, tower in zip(self._digests, towers, strict=True):
            self._cache.put(digest, tower, prod(tower.shape) * chain.visual_token_bytes)
        self.reused_towers = sum(tower is not None for tower in known)
        self._known.clear()
        return towers

    def restore(
        self, manifest: Manifest, plan: Plan | None, texts: Sequence[Sequence[int]], question: Sequence[int]
    ) -> Restored:
        model, segments, sanitizer = manifest.language_model, manifest.segments, None
        cut = [number for number, layers in enumerate(segments) if plan and str(layers[-1]) in plan.select_after]
        if plan is not None and plan.sanitizer is not None:
            sanitizer = manifest.files[manifest.graphs[plan.sanitizer].file].sha256
        shown, before = (*map(tuple, texts[:-1]),), cut[0] + 1 if cut else len(segments)
        self._key = PrefixKey((*self._digests,), shown, sanitizer, plan is not None, before, (*question,))
        lead = shown[0] if shown else ()
        worth = prefill_flops(model, [len(lead)] * model.num_layers) >= WORTH_FLOPS
        self._lead_key = LeadKey(lead if worth else (), (*cut,))
        stored = [*(self._cache.get(self._lead_key) or ())]
        self._new_lead = self._cache.stores_any and bool(self._lead_key.text) and not stored
        prefix: Prefix | None = self._cache.get(self._key)
        if prefix is None or not texts[-1]:
            return Restored(None, stored)
        rows, last = prefix.length + prefix.same(texts[-1]), len(prefix.saved) - 1
        stored[: last + 1] = [
            SessionSegment(rows, saved, prefix.scored if number == last else {})
            for number, saved in enumerate(prefix.saved)
        ]
        return Restored(prefix.encoded, stored)

    def keep(self, chain: Chain, run: PromptRun) -> None:
        if self._cache.stores(self._key, run.prompt.texts[-1]):
            self._keep_prefix(chain, run)
        if self._new_lead:
            self._keep_lead(chain, run)

    def _keep_prefix(self, chain: Chain, run: PromptRun) -> None:
        result, text, length = run.prefilled, run.prompt.texts[-1], run.rows.length
        segments = self._key.segments
        pairs = zip(chain.decoders[:segments], result.cache.segments[:segments], strict=True)
        saved = tuple(decoder.save(cache, length) for decoder, cache in pairs)
        read = next(iter(result.scored.values()), {})
        scored = {name: chain.backend.numpy(tensor) for name, tensor in read.items()}
        visual_bytes = chain.model.hidden_size * chain.dtype.itemsize + chain.visual_token_bytes
        nbytes = kv_bytes(chain, [length] * segments) + sum(array.nbytes for array in scored.values())
        nbytes += visual_bytes * sum(one.rows for one in run.encoded)
        prefix = Prefix(tuple(run.encoded), tuple(text), length - len(text), saved, scored)
        self._cache.put(self._key, prefix, nbytes)

    def _keep_lead(self, chain: Chain, run: PromptRun) -> None:
        rows, result = len(self._lead_key.text), run.prefilled
        pairs = zip(chain.decoders, result.cache.segments, strict=True)
        saved = [decoder.save(cache, rows) for decoder, cache in pairs]
        scored = {
            segment: {name: chain.backend.numpy(tensor)[..., :rows, :].copy() for name, tensor in read.items()}
            for segment, read in result.scored.items()
        }
        stored = tuple(SessionSegment(rows, own, scored.get(segment, {})) for segment, own in enumerate(saved))
        nbytes = sum(array.nbytes for one in stored for array in one.scored.values())
        self._cache.put(self._lead_key, stored, kv_bytes(chain, [rows] * len(stored)) + nbytes)


def why_no_sessions(pipeline: Pipeline) -> str:
    """Return why requests to a pipeline cannot share rows; "" where they can."""
    if pipeline.bundle.manifest.both_ways:
        return f"in family '{pipeline.bundle.manifest.family}' all rows of a prompt see its question"
    if not pipeline.chain.resumes:
        return (
            f"engines of dialect opset20 on '{pipeline.backend.name}' take no new rows after earlier ones: export "
            "with --dialect opset24 and build again"
        )
    return ""


class Session(StaysInProcess, Answering):
    """Answers requests with a pipeline, and remembers what later requests about the same pictures need again.

        session = Session(pipeline)
        session.generate("kitchen.jpg", "What is on the table?", budget="retain-64")
        session.generate("kitchen.jpg", "Is the kettle on?", budget="retain-64")

    The second answer is the one that `pipeline` gives, and its first token comes sooner. Neither the vision tower nor
    the sanitizer runs again. The decoder's layers before the first that prunes run for the new words only. Then the
    tokens are selected anew, for the new question. `Answer.reused_rows` counts the rows that were not computed again.

    Pictures are recognised by their pixels. Requests also share rows if they have the same text before the pictures,
    the same method, and budgets with the same sanitizer. About another picture, they share the text before it. Times
    of answers that reuse rows of pictures do not correct a pipeline's costs. Any number of threads may share a
    session (docs/sessions.md).
    """

    @checks_options
    def __init__(self, pipeline: Pipeline, max_bytes: int = MAX_BYTES) -> None:
        """Start with an empty memory of at most `max_bytes`. What was used least recently is dropped first.

        Raises `UsageError` for a wrong size and for what `why_no_sessions` names, and `TypeError` for what is no
        `Pipeline`.
        """
        check_type("pipeline", pipeline, (Pipeline,), "a Pipeline, as in Session(Pipeline.load('llava-7b'))")
        if reason := why_no_sessions(pipeline):
            raise UsageError(f"sessions need rows that no later row changes, and {reason}. Use the pipeline alone.")
        self.pipeline, self._prefixes = pipeline, PrefixCache(_BYTES.check(max_bytes))

    @property
    def nbytes(self) -> int:
        """The bytes in use, on the device and the host."""
        return self._prefixes.nbytes

    def new_request(
        self, image: PictureLike | Sequence[PictureLike], prompt: str | Sequence[Text], **options: Any
    ) -> Request:
        return self.pipeline.new_request(image, prompt, **options)

    def answer(self, request: Request, observer: Observer = NOBODY) -> Stream:
        return self.pipeline.answer(request, observer, lambda: SessionRows(self._prefixes))
