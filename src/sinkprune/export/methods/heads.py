"""The file of attention heads that stages read, which `sinkprune-calibrate attention` writes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sinkprune.contract.budgets import prune_layers
from sinkprune.contract.checks import Bounds, Count, format_value
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.versioned_file import read_versioned, write_versioned
from sinkprune.contract.manifest import LanguageModel

WITH_HEADS = ("sinkpruner-heads", "sinkpruner-text-heads")
"""The methods whose stages read chosen heads."""
HOW_TO_CHOOSE = (
    "Choose heads with a bundle of this checkpoint that has method sinkpruner: sinkprune-calibrate attention BUNDLE "
    "--data FILE.jsonl --heads heads.json. Then export with --heads heads.json."
)

HEADS_VERSION = 1


@dataclass(frozen=True)
class LayerHeads:
    """The heads of one layer."""

    chosen: Annotated[tuple[Count, ...], Bounds(0, 1 << 14)]
    """The 0-based numbers of the heads whose attention counts, ascending; a layer without one has no stage."""
    question_dependence: tuple[float, ...]
    """In nats, by head: how much the question changes where the head looks (`sinkprune.calibration.attention`)."""


@dataclass(frozen=True)
class ChosenHeads:
    """The content of a file of heads."""

    heads_version: int
    model: str
    """The name of the checkpoint that they were chosen for."""
    layers: dict[str, LayerHeads]
    """By the 0-based number of the prune layer."""

    def check_read_by(self, methods: Collection[str]) -> None:
        """Raise `UsageError` if none of the `methods` reads heads."""
        if not {*WITH_HEADS} & {*methods}:
            raise UsageError(
                f"found --heads, which are for methods {' and '.join(WITH_HEADS)}. Add one of them to --methods, or "
                "leave --heads out."
            )

    def of(self, model: LanguageModel) -> dict[int, tuple[int, ...]]:
        """Return the heads by layer, for a decoder with the layers and heads of `model`.

        Raises `UsageError` for heads of a decoder with other prune layers or another number of heads.
        """
        wanted = [str(layer) for layer in prune_layers(model.num_layers)]
        if [*self.layers] != wanted:
            raise UsageError(
                f"the heads are of layers {', '.join(self.layers) or 'none'} of {format_value(self.model)}, and this "
                f"decoder is pruned after layers {', '.join(wanted)}. {HOW_TO_CHOOSE}"
            )
        for layer, found in self.layers.items():
            if len(found.question_dependence) != model.num_heads:
                raise UsageError(
                    f"the heads are of a decoder with {len(found.question_dependence)} heads, "
                    f"{format_value(self.model)}, and this one has {model.num_heads}. {HOW_TO_CHOOSE}"
                )
            if list(found.chosen) != sorted({*found.chosen}) or any(head >= model.num_heads for head in found.chosen):
                raise UsageError(
                    f"the heads of layer {layer} are {', '.join(map(str, found.chosen))}, expected ascending numbers "
                    f"from 0 to {model.num_heads - 1}. {HOW_TO_CHOOSE}"
                )
        return {int(layer): found.chosen for layer, found in self.layers.items()}


def write_heads(path: Path, heads: ChosenHeads) -> None:
    """Write the heads to the JSON file `path`; raises `OutputError`."""
    write_versioned(path, heads)


def read_heads(path: Path) -> ChosenHeads:
    """Return the heads in the JSON file `path`; raises `UsageError` for any other file."""
    return read_versioned(path, ChosenHeads, "heads", HEADS_VERSION, HOW_TO_CHOOSE)
