"""One form of a bundle on its way through the unpruned chain, graph by graph, with all prompts at once.

Rows of pruned prompts are rows of these, fewer of them: what is chosen for all serves every budget.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

import numpy as np

from sinkprune.calibration.quantising.prompts import Shown
from sinkprune.calibration.quantising.stretches import Tensors
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.manifest import EMBEDDING, Manifest
from sinkprune.contract.precision import DTYPES, Array
from sinkprune.runtime.backends import Backend, load_backend
from sinkprune.runtime.families import load_family
from sinkprune.runtime.families.rotary import Rotary
from sinkprune.runtime.steps.embedding import Embedding
from sinkprune.runtime.steps.encoding import Encoded
from sinkprune.runtime.steps.prompt_rows import lay_out


def order(manifest: Manifest) -> list[str]:
    """The graphs that hold weights, as an unpruned request runs them."""
    decoders = [f"decoder_{segment}" for segment in range(len(manifest.segments))]
    return ["vision", *filter(None, [manifest.projector]), *decoders, "head"]


class Walk:
    """All prompts, each in front of the same graph."""

    def __init__(self, bundle: Bundle, shown: Sequence[Shown]) -> None:
        """In front of the vision tower."""
        backend, embedding = load_backend("ort-cpu"), Embedding(bundle.files[EMBEDDING], bundle.manifest)
        between = load_family(bundle.manifest).between_rows
        self._prompts = [_steps(bundle.manifest, backend, embedding, between, prompt) for prompt in shown]
        self.feeds: list[Tensors] = [next(prompt) for prompt in self._prompts]
        """What the graph is given of each prompt; the head only of the text behind the picture."""
        self.logits: list[Array] = []
        """[vocab] of each prompt, behind the head."""

    def advance(self, given: Iterable[Tensors]) -> None:
        """Stand in front of the next graph, now that this one gave that of each prompt."""
        for number, (prompt, outputs) in enumerate(zip(self._prompts, given, strict=True)):
            try:
                self.feeds[number] = prompt.send(outputs)
            except StopIteration as done:
                self.logits.append(done.value)


def _steps(
    manifest: Manifest, backend: Backend, embedding: Embedding, between_rows: str | None, prompt: Shown
) -> Generator[Tensors, Tensors, Array]:
    """An unpruned request: yields what each graph is given, is sent what it gives, and returns the logits [vocab]."""
    seen = yield prompt.seen.inputs
    tokens = seen["tokens"]
    if manifest.projector:
        tokens = (yield {"tokens": tokens})["embeddings"]
    groups, count = seen["norms"].shape
    every = np.broadcast_to(np.arange(count), (groups, count))
    beside = backend.tensor(seen["deepstack"]) if "deepstack" in seen else None
    encoded = Encoded(backend.tensor(tokens), None, every, seen["norms"], seen["salience"], beside)
    shown = [(prompt.seen.layout, encoded)]
    rows = lay_out(backend, embedding, between_rows, prompt.texts, shown, pruned=False)
    hidden, added = backend.numpy(rows.hidden), {name: backend.numpy(x) for name, x in rows.beside.items()}
    lm = manifest.language_model
    rotary = Rotary(lm.rope_theta, lm.head_dim, DTYPES[manifest.precision], lm.rope_sections)
    cos, sin = rotary.tables(rows.positions.rows)
    for segment in range(len(manifest.segments)):
        past = _no_past(manifest, segment, rows.length)
        own = added if segment == 0 else {}
        hidden = (yield {"hidden": hidden, "cos": cos, "sin": sin, **own, **past})["hidden_out"]
    # It takes the last row. The others are rows it may be given too.
    return (yield {"hidden": hidden[:, rows.text]})["logits"][0]


def _no_past(manifest: Manifest, segment: int, rows: int) -> Tensors:
    """Caches that hold nothing, with room for the new `rows` where they are written in place."""
    room = rows if manifest.cache == "in-place" else 0
    past = [spec for spec in manifest.graphs[f"decoder_{segment}"].inputs if spec.name.startswith("past_")]
    shapes = [[size if isinstance(size, int) else room for size in spec.shape] for spec in past]
    return {spec.name: np.zeros(shape, spec.dtype) for spec, shape in zip(past, shapes, strict=True)}
