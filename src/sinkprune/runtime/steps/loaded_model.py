"""The parts of a loaded bundle that a request runs on."""

from __future__ import annotations

from typing import NamedTuple

from sinkprune.contract.engines_manifest import Limits
from sinkprune.contract.manifest import Manifest
from sinkprune.runtime.families import Family
from sinkprune.runtime.steps.chain import Chain
from sinkprune.runtime.steps.embedding import Embedding
from sinkprune.runtime.steps.picture_warnings import PictureWarnings
from sinkprune.runtime.text.prompt import PromptEncoder


class LoadedModel(NamedTuple):
    """A bundle on a backend: what preprocesses, tokenizes, embeds and computes."""

    manifest: Manifest
    limits: Limits | None
    """Limits of the engines; None for graphs, which have none."""
    family: Family
    prompts: PromptEncoder
    embedding: Embedding
    chain: Chain
    warnings: PictureWarnings
