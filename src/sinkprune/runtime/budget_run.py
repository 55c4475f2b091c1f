"""The steps of a request that depend on its budget, from the sanitizer to the first token's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import Schedule
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.steps.chain import Chain
from sinkprune.runtime.steps.decoding import Prefill, first_logits, kv_bytes, prefill
from sinkprune.runtime.steps.encoding import EncodedPicture, TowerOutput, encode
from sinkprune.runtime.steps.kept import Kept, kept_tokens
from sinkprune.runtime.steps.loaded_model import LoadedModel
from sinkprune.runtime.steps.observer import Observer
from sinkprune.runtime.steps.prefix_cache import (
    LeadKey,
    Prefix,
    PrefixCache,
    PrefixKey,
    StoredRows,
    segments_before_select,
)
from sinkprune.runtime.steps.prompt_rows import PromptRows, lay_out
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.text.prompt import Prompt


@dataclass(frozen=True)
class SeenPrompt:
    """What a request needs at any budget."""

    request: Request
    prompt: Prompt
    layouts: Sequence[VisualLayout]
    digests: Sequence[bytes]
    """Of the pictures, as `PrefixCache.digests` returns them."""
    towers: Sequence[TowerOutput]


@dataclass(frozen=True)
class PromptReport:
    """What an `Answer` reports of its prompt at its budget. Refers to nothing on the device."""

    budget: str
    images: tuple[Kept, ...]
    tokens_per_layer: list[int]
    kv_bytes: int
    reused_rows: int
    knew_pictures: bool
    """Whether rows of the pictures were reused."""


@dataclass(frozen=True)
class BudgetRun:
    """A prompt after the prefill at one budget."""

    seen: SeenPrompt
    key: PrefixKey
    lead_key: LeadKey
    encoded: Sequence[EncodedPicture]
    rows: PromptRows
    prefilled: Prefill
    logits: Array
    """[vocab], of the first token."""
    reused_rows: int
    knew_pictures: bool
    """Whether they include rows of the pictures."""
    new_lead: bool
    """Whether the text before the first picture is worth storing."""

    def report(self, chain: Chain) -> PromptReport:
        """Return what each step kept of each picture's visual tokens, and sizes; raises `BundleError`."""
        result, layers = self.prefilled, chain.model.num_layers
        return PromptReport(
            budget=result.schedule.budget,
            images=kept_tokens(chain.backend, self.seen.layouts, self.encoded, self.rows, result),
            tokens_per_layer=result.schedule.per_layer(layers),
            kv_bytes=kv_bytes(chain, result.cache.lengths),
            reused_rows=self.reused_rows,
            knew_pictures=self.knew_pictures,
        )

    def store(self, chain: Chain, prefixes: PrefixCache) -> None:
        """Store what later requests may share, where it is worth storing."""
        if prefixes.stores(self.key, self.seen.prompt.texts[-1]):
            self._put_prefix(chain, prefixes)
        if self.new_lead:
            self._put_lead(chain, prefixes)

    def _put_prefix(self, chain: Chain, prefixes: PrefixCache) -> None:
        """Store the prompt's rows in the segments before the first select; the cache may have grown since."""
        result, text, length = self.prefilled, self.seen.prompt.texts[-1], self.rows.length
        segments = segments_before_select(chain.segments, result.schedule.plan)
        pairs = zip(chain.decoders[:segments], result.cache.segments[:segments], strict=True)
        saved = tuple(decoder.save(cache, length) for decoder, cache in pairs)
        scored = {name: chain.backend.numpy(tensor) for name, tensor in result.scored.items()}
        visual_bytes = chain.model.hidden_size * chain.dtype.itemsize + chain.visual_token_bytes
        nbytes = kv_bytes(chain, [length] * segments) + sum(array.nbytes for array in scored.values())
        nbytes += visual_bytes * sum(one.kept_index.size for one in self.encoded)
        prefix = Prefix(tuple(self.encoded), tuple(text), length - len(text), saved, scored)
        prefixes.put(self.key, prefix, nbytes)

    def _put_lead(self, chain: Chain, prefixes: PrefixCache) -> None:
        """Store the rows of the text before the first picture, in all segments."""
        rows, result = len(self.lead_key.text), self.prefilled
        pairs = zip(chain.decoders, result.cache.segments, strict=True)
        saved = [decoder.save(cache, rows) for decoder, cache in pairs]
        stored = tuple(StoredRows(rows, own, result.lead.get(segment, {})) for segment, own in enumerate(saved))
        nbytes = sum(array.nbytes for one in stored for array in one.scored.values())
        prefixes.put(self.lead_key, stored, kv_bytes(chain, [rows] * len(stored)) + nbytes)


def run_budget(
    model: LoadedModel,
    seen: SeenPrompt,
    planned: Schedule,
    clock: Stopwatch,
    observer: Observer,
    prefixes: PrefixCache,
) -> BudgetRun:
    """Run the steps at the `planned` budget, but for rows that `prefixes` has.

    Raises what `prefill` does.
    """
    manifest, embedding, chain, backend = model.manifest, model.embedding, model.chain, model.chain.backend
    plan, texts = planned.plan, seen.prompt.texts
    question = model.question_ids(plan, seen.request, seen.prompt)
    key, lead_key = PrefixKey.of(manifest, plan, seen.digests, texts, question), LeadKey.of(manifest, plan, texts)
    stored, new_lead = [*prefixes.lead(lead_key)], prefixes.stores_lead(lead_key)
    shared = prefixes.shared(key, texts[-1])
    if shared is None:
        words = backend.tensor(embedding(question)) if question else None
        encoded = [encode(chain, plan, tower, clock, words) for tower in seen.towers]
    else:
        prefix, rows_shared = shared
        encoded = [*prefix.encoded]
        stored[: len(prefix.saved)] = prefix.stored(rows_shared)
    observer.encoded(encoded)
    rows = lay_out(
        backend, embedding, model.family.between_rows, texts, seen.layouts, encoded, pruned=plan is not None
    )
    observer.laid_out(rows)
    norms, lead = seen.towers[0].device_norms if seen.towers else None, len(lead_key.text) if new_lead else 0
    prefilled = prefill(chain, planned, rows, clock, norms, stored, lead)
    logits: Array = backend.numpy(first_logits(chain, prefilled, clock))[0]
    reused = stored[0].rows if stored else 0
    return BudgetRun(
        seen=seen,
        key=key,
        lead_key=lead_key,
        encoded=encoded,
        rows=rows,
        prefilled=prefilled,
        logits=logits,
        reused_rows=reused,
        knew_pictures=shared is not None,
        new_lead=new_lead,
    )
