"""The steps of a request that depend on its budget, from the sanitizer to the first token's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import Schedule
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.steps.answer import Kept
from sinkprune.runtime.steps.chain import Chain
from sinkprune.runtime.steps.decoding import Prefill, first_logits, kept_tokens, kv_bytes, lead_of, prefill, prefix_of
from sinkprune.runtime.steps.encoding import EncodedPicture, TowerOutput, encode
from sinkprune.runtime.steps.loaded_model import LoadedModel
from sinkprune.runtime.steps.observer import Observer
from sinkprune.runtime.steps.prefix_cache import LeadKey, PrefixCache, PrefixKey
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
class BudgetReport:
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

    def report(self, chain: Chain) -> BudgetReport:
        """Return what each step kept of each picture's visual tokens, and sizes; raises `BundleError`."""
        result, text = self.prefilled, self.seen.prompt.text_tokens
        return BudgetReport(
            result.schedule.budget,
            kept_tokens(chain, self.seen.layouts, self.encoded, self.rows, result),
            [length - text for length in result.tokens_per_layer],
            kv_bytes(chain, result.cache.lengths),
            self.reused_rows,
            self.knew_pictures,
        )

    def store(self, chain: Chain, prefixes: PrefixCache) -> None:
        """Store what later requests may share, where it is worth storing."""
        if prefixes.stores(self.key, self.seen.prompt.texts[-1]):
            self.put_prefix(chain, prefixes)
        if self.new_lead:
            prefixes.put(self.lead_key, *lead_of(chain, len(self.lead_key.text), self.prefilled))

    def put_prefix(self, chain: Chain, prefixes: PrefixCache) -> None:
        """Store the rows before the first select."""
        plan, text = self.prefilled.schedule.plan, self.seen.prompt.texts[-1]
        prefixes.put(self.key, *prefix_of(chain, plan, self.rows, self.encoded, text, self.prefilled))


def run_budget(
    model: LoadedModel,
    seen: SeenPrompt,
    planned: Schedule,
    clock: Stopwatch,
    observer: Observer,
    own_prefixes: PrefixCache,
    prefixes: PrefixCache,
) -> BudgetRun:
    """Run the steps at the `planned` budget, but for rows that `own_prefixes` or `prefixes` has.

    Raises what `prefill` does.
    """
    manifest, _, family, _, embedding, chain, _ = model
    backend, plan, texts = chain.backend, planned.plan, seen.prompt.texts
    question = model.question_ids(plan, seen.request, seen.prompt)
    key, lead_key = PrefixKey.of(manifest, plan, seen.digests, texts, question), LeadKey.of(manifest, plan, texts)
    stored, new_lead = [*prefixes.lead(lead_key)], prefixes.stores_lead(lead_key)
    shared = own_prefixes.shared(key, texts[-1]) or prefixes.shared(key, texts[-1])
    if shared is None:
        words = backend.tensor(embedding(question)) if question else None
        encoded = [encode(chain, plan, tower, clock, words) for tower in seen.towers]
    else:
        prefix, rows_shared = shared
        encoded = [*prefix.encoded]
        stored[: len(prefix.saved)] = prefix.stored(rows_shared)
    observer.encoded(encoded)
    planned = planned.with_rows([one.kept_index.size for one in encoded])
    shown = list(zip(seen.layouts, encoded, strict=True))
    rows = lay_out(backend, embedding, family.between_rows, texts, shown, pruned=plan is not None)
    observer.laid_out(rows)
    norms, lead = encoded[0].device_norms if encoded else None, len(lead_key.text) if new_lead else 0
    prefilled = prefill(chain, planned, rows, clock, norms, stored, lead)
    logits: Array = backend.numpy(first_logits(chain, prefilled, clock))[0]
    reused = stored[0].rows if stored else 0
    return BudgetRun(seen, key, lead_key, encoded, rows, prefilled, logits, reused, shared is not None, new_lead)
