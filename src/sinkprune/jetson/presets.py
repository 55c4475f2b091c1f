"""The models of `sinkprune-export --random-weights`, as manifests: what they will be before anything is exported.

Their facts stand in `presets.json`, as the export has them. `tests/support/models/preset_facts.py` writes that file,
and a test compares it. This room imports nothing of the export, which a board does not have.
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
    """Bytes of the weights of graphs in fp16."""

    vision: Annotated[int, Bounds(1, 1 << 50)]
    projector: Annotated[int, Bounds(0, 1 << 50)]
    """0 where there is none."""
    layer: Annotated[int, Bounds(1, 1 << 50)]
    """Of one decoder layer."""
    head: Annotated[int, Bounds(1, 1 << 50)]


@dataclass(frozen=True)
class PresetFacts:
    """What memory and time of a model depend on."""

    family: str
    language_model: LanguageModel
    vision: Tower
    projector: str | None
    processor: dict[str, Any]
    visual_tokens: Width | None
    """N, where each group of every picture has as many; None where pictures differ in theirs."""
    most_visual_tokens: Width
    vision_graph: GraphSpec
    weight_bytes: WeightBytes


@cache
def read_presets() -> dict[str, PresetFacts]:
    """The facts of every preset, by its name."""
    return {name: from_json(PresetFacts, data, f"$.{name}") for name, data in read_json(_FILE).items()}


def preset_manifest(name: str, facts: PresetFacts, dialect: DialectName) -> Manifest:
    """The manifest of a bundle of these facts in fp16, with method `sinkpruner` at every budget of the family.

    No file of it is anywhere: only the sizes of weights are told, and of graphs the interface of `vision`.
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
