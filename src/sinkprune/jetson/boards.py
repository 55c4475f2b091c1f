"""Boards and JetPacks, and the presets of models.

`boards.json` has figures for the GPU alone, dense, in the fastest power mode, from datasheets and not from
measurements; a test checks that each fact has a source. `presets.json` has the facts of presets, since a board lacks
the export. `tests/support/models/preset_facts.py` writes it, and a test compares it with the export.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from sinkprune.contract.budgets import FAMILIES, NOMINAL_TOKENS, Plan, decoder_cuts, one_stage, prune_layers
from sinkprune.contract.checks import OPTIONAL, Bounds, Width, from_json, unknown_name
from sinkprune.contract.errors import UnknownBoardError
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
    Tower,
    decoder_segments,
)
from sinkprune.contract.policy_facts import PolicyFacts
from sinkprune.contract.precision import WeightForms

_PRESETS_FILE = Path(__file__).with_name("presets.json")
_METHOD = "sinkpruner"
_CAMERAS = range(3)
"""The cameras of a policy's preset, as in openpi's `pi0_base`."""


@dataclass(frozen=True)
class WeightBytes:
    vision: Annotated[int, Bounds(1, 1 << 50)]
    projector: Annotated[int, Bounds(0, 1 << 50)]
    """0 without a projector."""
    layer: Annotated[int, Bounds(1, 1 << 50)]
    """One decoder layer."""
    last_layer: Annotated[int, Bounds(1, 1 << 50)]
    """The last decoder layer, of which a policy computes keys and values only."""
    after: dict[str, Annotated[int, Bounds(1, 1 << 50)]]
    """By name, the graphs after the decoder: `head`, or those of a policy's expert."""


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
    policy: PolicyFacts | None = field(default=None, metadata=OPTIONAL)


@cache
def read_presets() -> dict[str, PresetFacts]:
    """Return the facts by name. In the file, a name in the place of facts is the preset that has the same."""
    found = read_json(_PRESETS_FILE)
    facts = {name: found[data] if isinstance(data, str) else data for name, data in found.items()}
    return {name: from_json(PresetFacts, data, f"$.{name}") for name, data in facts.items()}


def preset_manifest(name: str, facts: PresetFacts, dialect: DialectName) -> Manifest:
    """Return the manifest of such a bundle in fp16, with method `sinkpruner` at every budget of the family.

    Its files do not exist. Only the sizes of weights and the interface of `vision` are filled in.
    """
    lm, budgets = facts.language_model, dict(FAMILIES[facts.family].budgets)
    nominal = facts.visual_tokens or NOMINAL_TOKENS
    stages = prune_layers(lm.num_layers)[:1]
    cuts = decoder_cuts(stages, lm.num_layers)
    segments, weights = decoder_segments(cuts, lm.num_layers), facts.weight_bytes
    sizes = {"vision": weights.vision, **({facts.projector: weights.projector} if facts.projector else {})}
    sizes |= {f"decoder_{number}": len(layers) * weights.layer for number, layers in enumerate(segments)}
    sizes[f"decoder_{len(segments) - 1}"] += weights.last_layer - weights.layer
    sizes |= weights.after
    plans = {
        budget: Plan(
            sanitizer="sanitizer",
            select_after={str(cut): f"select_after_{cut}" for cut in stages},
            positions=shares.positions,
            counts=shares.resolve(facts.visual_tokens) if facts.visual_tokens else None,
            shares=None if facts.visual_tokens else shares,
        )
        for budget, shares in ((name, one_stage(row, nominal, lm.num_layers)) for name, row in budgets.items())
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
        max_images=len(facts.policy.cameras or _CAMERAS) if facts.policy else 1,
        projector=facts.projector,
        processor=facts.processor,
        tokens=Tokens(0, (), "", ""),
        cut_after=cuts,
        budgets=budgets,
        plans={_METHOD: plans},
        graphs={graph: facts.vision_graph if graph == "vision" else GraphSpec("", (), ()) for graph in sizes},
        policy=facts.policy,
        files={f"graphs/weights/{graph}.bin": FileSpec(size, "") for graph, size in sizes.items()},
    )


_FILE = Path(__file__).with_name("boards.json")

Figure = Annotated[float, Bounds(0.1, 1e5)]
"""A figure of a datasheet, in the unit of its name."""


@dataclass(frozen=True)
class FactSource:
    """The source of a fact."""

    document: str
    url: str
    checked: str
    """Whether and how it was verified."""


@dataclass(frozen=True)
class Board:
    """A Jetson module."""

    module: str
    """The vendor's name."""
    sm: Annotated[int, Bounds(50, 999)]
    """The GPU's compute capability: 87 for sm_87."""
    memory_gb: Annotated[int, Bounds(1, 1024)]
    """GiB, which CPU and GPU share."""
    gb_per_s: Figure
    """The memory's peak bandwidth, in 1e9 bytes a second."""
    fp16_tflops: Figure
    """Dense, in 1e12 operations a second."""
    int8_tops: Figure | None
    """Dense, in 1e12 operations a second; None if unknown."""
    power_modes: tuple[str, ...]
    compatible: tuple[str, ...]
    """Words in /proc/device-tree/compatible that identify the module; empty if no public source has one."""
    sources: dict[str, str]
    """The name of each fact's source, by the fact."""


@dataclass(frozen=True)
class SystemMemory:
    linux_sees_per_mille: Annotated[int, Bounds(1, 1000)]
    """The share of the module's memory that firmware leaves to Linux."""
    system_takes_mb: Annotated[int, Bounds(0, 1 << 20)]
    """MiB that a system without a desktop uses."""
    sources: dict[str, str]


@dataclass(frozen=True)
class JetPack:
    version: str
    first_l4t: str
    """Its first release of Jetson Linux (L4T)."""
    ubuntu: str
    python: str
    cuda: str
    tensorrt: str
    dialect: DialectName
    """The newest dialect that its TensorRT supports."""
    sm: tuple[int, ...]
    """The GPUs of its boards."""
    source: str


@dataclass(frozen=True)
class Boards:
    """The content of `boards.json`."""

    sources: dict[str, FactSource]
    system_memory: SystemMemory
    boards: dict[str, Board]
    """By the names of `sinkprune-doctor --board`."""
    chips: dict[str, str]
    """Names of the modules with a chip, by the chip's word in /proc/device-tree/compatible."""
    jetpacks: tuple[JetPack, ...]
    """Oldest first."""

    def board(self, name: str) -> Board:
        """Return the board with this name. Raises `UnknownBoardError` with the known names."""
        if name not in self.boards:
            raise UnknownBoardError(unknown_name(f"unknown board '{name}'", name, self.boards, "Known boards"))
        return self.boards[name]

    def name_of(self, compatible: Iterable[str]) -> str | None:
        """Return the name of the board whose device tree has these words; None if it is unknown."""
        words = set(compatible)
        return next((name for name, board in self.boards.items() if words & set(board.compatible)), None)

    def jetpack(self, l4t: str) -> JetPack | None:
        """Return the JetPack of a release of L4T, as in "36.4.3"; None if its major number is unknown, or too old."""
        found = _numbers(l4t)
        before = [pack for pack in self.jetpacks if _numbers(pack.first_l4t) <= found]
        return before[-1] if before and _numbers(before[-1].first_l4t)[0] == found[0] else None

    def usable_bytes(self, board: Board) -> int:
        """Return about how many bytes of a board's memory are for programs."""
        rest = self.system_memory
        return (board.memory_gb << 30) * rest.linux_sees_per_mille // 1000 - (rest.system_takes_mb << 20)


@cache
def read_boards() -> Boards:
    """Return the known boards and releases."""
    return from_json(Boards, read_json(_FILE))


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without zeros at its end: 36.4.0 is 36.4."""
    parts = [int(part) if part.isdecimal() else 0 for part in version.split(".")]
    while len(parts) > 1 and parts[-1] == 0:
        parts.pop()
    return tuple(parts)
