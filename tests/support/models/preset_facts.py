"""What `jetson/presets.json` must hold, as the export has it. Run as a program, this writes the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sinkprune.contract.checks import to_json
from sinkprune.contract.precision import WeightsName
from sinkprune.export.checkpoint.presets import PRESETS, SAME_SHAPES
from sinkprune.export.dialects import load_dialect
from sinkprune.export.families import Family, read_family
from sinkprune.export.graph import WeightedGraph
from sinkprune.export.weights import PRECISIONS, form_of
from sinkprune.jetson import boards as presets
from sinkprune.jetson.boards import PresetFacts, WeightBytes

AFTER = ("head", "modulation", "expert", "action_head", "state_projector")
"""Graphs with weights besides the tower, the projector and the decoder."""


def weight_graphs(family: Family, form: WeightsName, vision_form: WeightsName) -> dict[str, WeightedGraph]:
    """The graphs with weights, whose states are fp16; no weight is read.

    `decoder_0` is the first layer of the decoder and `decoder_1` the last. An expert has all its layers.
    """
    graphs, layers = {}, family.language_model.num_layers
    ends = family.graphs([range(1), range(layers - 1, layers)], ())
    whole = {**family.graphs([range(layers)], ()), "decoder_0": ends["decoder_0"], "decoder_1": ends["decoder_1"]}
    for name, write in whole.items():
        matrices = form_of(vision_form if name == "vision" else form, 128)
        graphs[name] = WeightedGraph(
            name, PRECISIONS["fp16"], load_dialect("opset24"), matrices, lambda name, shape: None
        )
        write(graphs[name])
    return graphs


def facts_of(name: str, config: Mapping[str, Any]) -> PresetFacts:
    """The facts of a configuration in the words of config.json."""
    family = read_family(name, config)
    processor = family.processor({})
    tokens, graphs = family.tokens_of(processor), weight_graphs(family, "fp16", "fp16")
    return PresetFacts(
        family=family.name,
        language_model=family.language_model,
        vision=family.vision,
        projector=family.projector,
        processor=processor,
        visual_tokens=tokens if isinstance(tokens, int) else None,
        most_visual_tokens=tokens if isinstance(tokens, int) else tokens.most,
        vision_graph=graphs["vision"].interface(""),
        weight_bytes=WeightBytes(
            vision=graphs["vision"].bytes,
            projector=graphs[family.projector].bytes if family.projector else 0,
            layer=graphs["decoder_0"].bytes,
            last_layer=graphs["decoder_1"].bytes,
            after={name: graphs[name].bytes for name in AFTER if name in graphs},
        ),
        policy=family.policy({}),
    )


def written() -> str:
    """The content of `presets.json`."""
    own = {name: to_json(facts_of(name, config)) for name, config in PRESETS.items() if name not in SAME_SHAPES}
    return json.dumps({**own, **SAME_SHAPES}, indent=1) + "\n"


if __name__ == "__main__":
    Path(presets.__file__).with_name("presets.json").write_text(written(), encoding="utf-8")
