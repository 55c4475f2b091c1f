"""Runs all prompts through the unpruned chain of a bundle, graph by graph.

Rows of pruned prompts are a subset of these rows. So one rounding serves every budget.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from sinkprune.calibration.quantising.subgraphs import Tensors
from sinkprune.calibration.tasks import Item
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.manifest import EMBEDDING, Manifest
from sinkprune.contract.precision import DTYPES, Array
from sinkprune.runtime.backends import Backend, load_backend
from sinkprune.runtime.families import TowerInput, load_family
from sinkprune.runtime.families.rotary import Rotary
from sinkprune.runtime.media.fits import Fit
from sinkprune.runtime.steps.embedding import Embedding
from sinkprune.runtime.steps.encoding import EncodedPicture
from sinkprune.runtime.steps.prompt_rows import lay_out
from sinkprune.runtime.text.prompt import PromptEncoder


class EncodedPrompt(NamedTuple):
    """A prompt about one picture, as the model takes it."""

    picture: TowerInput
    texts: list[list[int]]
    """Token ids before the picture and after it."""


def encode_prompts(bundle: Bundle, items: Iterable[Item], fit: Fit | None = None) -> list[EncodedPrompt]:
    """Encode pictures and questions for the model of `bundle`; raises `ImageError`, `PromptError`, `UsageError`.

    `fit` is how a picture becomes a square; None is the checkpoint's own way.
    """
    family, encoder = load_family(bundle.manifest, fit), PromptEncoder.of_bundle(bundle)
    prompts = []
    for item in items:
        picture = item.load_image()
        tower = TowerInput(family.inputs(picture), family.layout(picture))
        prompts.append(EncodedPrompt(tower, encoder.encode(["", item.question.prompt], [tower.layout.texts]).texts))
    return prompts


def weight_graphs(manifest: Manifest) -> list[str]:
    """Return the graphs that hold weights, in the order in which an unpruned request runs them."""
    decoders = [f"decoder_{segment}" for segment in range(len(manifest.segments))]
    return ["vision", *filter(None, [manifest.projector]), *decoders, "head"]


class ChainRun:
    """All prompts, each before the same graph."""

    def __init__(self, bundle: Bundle, prompts: Sequence[EncodedPrompt]) -> None:
        """Start before the vision tower."""
        backend, embedding = load_backend("ort-cpu"), Embedding(bundle.files[EMBEDDING], bundle.manifest)
        between = load_family(bundle.manifest).between_rows
        self._prompts = [_steps(bundle.manifest, backend, embedding, between, prompt) for prompt in prompts]
        self.feeds: list[Tensors] = [next(prompt) for prompt in self._prompts]
        """The graph's inputs for each prompt; those of the head are the rows of the text after the picture."""
        self.logits: list[Array] = []
        """[vocab] for each prompt, after the head."""

    def advance(self, outputs: Iterable[Tensors]) -> None:
        """Go on to the next graph, with the outputs of this one for each prompt."""
        for number, (prompt, own) in enumerate(zip(self._prompts, outputs, strict=True)):
            try:
                self.feeds[number] = prompt.send(own)
            except StopIteration as done:
                self.logits.append(done.value)


def _steps(
    manifest: Manifest, backend: Backend, embedding: Embedding, between_rows: str | None, prompt: EncodedPrompt
) -> Generator[Tensors, Tensors, Array]:
    """Run an unpruned request: yield each graph's inputs, receive its outputs, and return the logits [vocab]."""
    tower = yield prompt.picture.inputs
    tokens = tower["tokens"]
    if manifest.projector:
        tokens = (yield {"tokens": tokens})["embeddings"]
    groups, count = tower["norms"].shape
    every = np.broadcast_to(np.arange(count), (groups, count))
    deepstack = backend.tensor(tower["deepstack"]) if "deepstack" in tower else None
    encoded = EncodedPicture(backend.tensor(tokens), every, tower["norms"], tower["salience"], deepstack)
    rows = lay_out(backend, embedding, between_rows, prompt.texts, [prompt.picture.layout], [encoded], pruned=False)
    hidden, added = backend.numpy(rows.hidden), {name: backend.numpy(x) for name, x in rows.deepstack_inputs.items()}
    lm = manifest.language_model
    rotary = Rotary(lm.rope_theta, lm.head_dim, DTYPES[manifest.precision], lm.rope_sections, lm.rope_factor)
    cos, sin = rotary.tables(rows.positions.rows)
    for segment in range(len(manifest.segments)):
        past = _no_past(manifest, segment, rows.length)
        own = added if segment == 0 else {}
        hidden = (yield {"hidden": hidden, "cos": cos, "sin": sin, **own, **past})["hidden_out"]
    # A request runs the head on the last row only. The other rows are possible inputs too.
    return (yield {"hidden": hidden[:, rows.text]})["logits"][0]


def _no_past(manifest: Manifest, segment: int, rows: int) -> Tensors:
    """Return empty caches, with room for the new `rows` if the graph writes them in place."""
    room = rows if manifest.cache == "in-place" else 0
    past = [spec for spec in manifest.graphs[f"decoder_{segment}"].inputs if spec.name.startswith("past_")]
    shapes = [[size if isinstance(size, int) else room for size in spec.shape] for spec in past]
    return {spec.name: np.zeros(shape, spec.dtype) for spec, shape in zip(past, shapes, strict=True)}
