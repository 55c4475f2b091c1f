"""Heads for the methods `WITH_HEADS` that nobody measured: one head in the first prune layer, two in the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sinkprune.contract.budgets import prune_layers
from sinkprune.export.methods import METHODS as ALL_METHODS
from sinkprune.export.methods.heads import HEADS_VERSION, ChosenHeads, LayerHeads

WITH_HEADS = ("sinkpruner-heads", "sinkpruner-text-heads")
"""The methods whose stages read chosen heads."""


def heads_by_layer(layers: int, heads: int) -> dict[int, tuple[int, ...]]:
    """The heads of each prune layer of a decoder of so many layers and heads."""
    first, *others = prune_layers(layers)
    pairs = {layer: tuple(sorted({0, heads - 1 - number})) for number, layer in enumerate(others)}
    return {first: (heads - 1,), **pairs}


def chosen_heads(layers: int, heads: int) -> ChosenHeads:
    """`heads_by_layer` as their file has them."""
    dependence = tuple(float(head) for head in range(heads))
    own = {str(layer): LayerHeads(found, dependence) for layer, found in heads_by_layer(layers, heads).items()}
    return ChosenHeads(HEADS_VERSION, "small", own)


def every_method(source: Path | Mapping[str, Any]) -> dict[str, Any]:
    """What `ExportRequest` needs to export a checkpoint, or a configuration, with every method."""
    config = source if isinstance(source, Mapping) else json.loads((source / "config.json").read_text())
    text = config.get("text_config", config)
    return {
        "methods": tuple(ALL_METHODS),
        "heads": chosen_heads(text["num_hidden_layers"], text["num_attention_heads"]),
    }
