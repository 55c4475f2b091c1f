"""Manifests of the models of `sinkprune-export --random-weights`, before anything is exported.

`presets.json` has their facts, since a board lacks the export. `tests/support/models/preset_facts.py` writes that
file, and a test compares it with the export.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from sinkprune.contract.budgets import prune_layers
from sinkprune.contract.checks.fields import Bounds, Width, from_json
from sinkprune.contract.families import FAMILIES
from sinkprune.contract.files.manifest_file import FileSpec
from sinkprune.contract.files.untrusted import read_json
from sinkprune.contract.manifest import (
    FORMAT_VERSION,
    Checkpoint,
    DialectName,
    GraphSpec,
    LanguageModel,
    Manifest,
    Tokens,
    decoder_segments,
)
from sinkprune.contract.plans import Plan
from sinkprune.contract.precision import WeightForms
from sinkprune.contract.towers import Tower

_FILE = Path(__file__).with_name("presets.json")
_METHOD = "sinkpruner"


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of the graphs' weights in fp16."""

    vision: Annotated[int, Bounds(1, 1 << 50)]
    projector: Annotated[int, Bounds(0, 1 << 50)]
    """0 without a projector."""
    layer: Annotated[int, Bounds(1, 1 << 50)]
    """One decoder layer."""
    head: Annotated[int, Bounds(1, 1 << 50)]


@dataclass(frozen=True)
class PresetFacts:
    """The facts of a model that its memory and times depend on."""

    family: str
    language_model: LanguageModel
    vision: Tower
    projector: str | None
    processor: dict[str, Any]
    visual_tokens: Width | None
    """N if all groups of all pictures have the same number; else None."""
    most_visual_tokens: Width
    vision_graph: GraphSpec
    weight_bytes: WeightBytes


@cache
def read_presets() -> dict[str, PresetFacts]:
    """Return the facts of every preset, by its name."""
    return {name: from_json(PresetFacts, data, f"$.{name}") for name, data in read_json(_FILE).items()}


def preset_manifest(name: str, facts: PresetFacts, dialect: DialectName) -> Manifest:
    """Return the manifest of such a bundle in fp16, with method `sinkpruner` at every budget of the family.

    Its files do not exist. Only the sizes of weights and the interface of `vision` are filled in.
    """
    lm, budgets = facts.language_model, dict(FAMILIES[facts.family].budgets)
    cuts = prune_layers(lm.num_layers)
    segments, weights = decoder_segments(cuts, lm.num_layers), facts.weight_bytes
    sizes = {"vision": weights.vision, **({facts.projector: weights.projector} if facts.projector else {})}
    sizes |= {f"decoder_{number}": len(layers) * weights.layer for number, layers in enumerate(segments)}
    sizes["head"] = weights.head
    plans = {
        budget: Plan(
            sanitizer="sanitizer",
            select_after={str(cut): f"select_after_{cut}" for cut in cuts},
            positions=shares.positions,
            counts=shares.resolve(facts.visual_tokens) if facts.visual_tokens else None,
            shares=None if facts.visual_tokens else shares,
        )
        for budget, shares in budgets.items()
    }
    return Manifest(
        format_version=FORMAT_VERSION,
        sinkprune_version="",
        family=facts.family,
        precision="fp16",
        weights=WeightForms("fp16", "fp16", None),
        dialect=dialect,
        cache="in-place",
        checkpoint=Checkpoint(name, "", random_weights=True),
        language_model=lm,
        vision=facts.vision,
        most_visual_tokens=facts.most_visual_tokens,
        max_images=1,
        projector=facts.projector,
        processor=facts.processor,
        tokens=Tokens(0, (), "", ""),
        cut_after=cuts,
        budgets=budgets,
        plans={_METHOD: plans},
        graphs={graph: facts.vision_graph if graph == "vision" else GraphSpec("", (), ()) for graph in sizes},
        files={f"graphs/weights/{graph}.bin": FileSpec(size, "") for graph, size in sizes.items()},
    )
