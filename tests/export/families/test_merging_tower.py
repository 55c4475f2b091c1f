"""The towers of options `tower` and `bars` against the checkpoint's own layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime
import pytest
import torch

from sinkprune.contract.budgets import BARLESS_TOWER
from sinkprune.contract.manifest import DialectName, SiglipTower, SquareTower, ViTTower
from sinkprune.contract.schedule import merges_of, vit_flops
from sinkprune.export.checkpoint.folder import SafetensorsWeights, read_json
from sinkprune.export.dialects import load_dialect
from sinkprune.export.families import read_family
from sinkprune.export.graph import WeightedGraph
from sinkprune.export.models.merging import Merging
from sinkprune.export.weights import PRECISIONS, form_of
from support.references.merging_tower import join, merged_tower
from support.references.pi0 import Pi0Reference

Array = np.ndarray[Any, Any]
CASES: list[tuple[str, DialectName, Mapping[int, int]]] = [
    # An odd number is left after the first block.
    ("gqa-112", "opset24", {0: 13, 1: 20}),
    ("gqa-112", "opset20", {1: 32}),
    ("siglip-2", "opset20", {0: 13}),
    ("pi0", "opset24", {0: 1}),
]


def new_graph(dialect: DialectName, read: Any = None) -> WeightedGraph:
    return WeightedGraph("vision", PRECISIONS["fp32"], load_dialect(dialect), form_of("fp32", None), read)


def run(graph: WeightedGraph, folder: Path, inputs: Mapping[str, Array]) -> dict[str, Array]:
    graph.save(folder, "vision.onnx")
    session = onnxruntime.InferenceSession(folder / "vision.onnx", providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


class Towers:
    """A small checkpoint's tower as a graph, on two pictures, next to its own layers."""

    def __init__(self, name: str, checkpoint: Callable[[str], Path], model: Callable[[str], Any]) -> None:
        folder = checkpoint(name)
        self.family = read_family(str(folder), read_json(folder, "config.json"))
        assert isinstance(self.family.vision, SquareTower)
        self.facts, self._normed = self.family.vision, name == "pi0"
        self._read = SafetensorsWeights(folder, None).tensor
        self._tower = (Pi0Reference(folder).model.model.vlm if self._normed else model(name).model).vision_tower
        side = self.facts.image_size
        self._pixels = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))

    def run(
        self, dialect: DialectName, build: Callable[[WeightedGraph], None], folder: Path, **inputs: Array
    ) -> dict[str, Array]:
        """The outputs of the graph that `build` writes."""
        graph = new_graph(dialect, self._read)
        build(graph)
        return run(graph, folder, {"pixel_values": self._pixels.numpy(), **inputs})

    def assert_equal(
        self, found: dict[str, Array], group: int, merges: Mapping[int, int], places: Array | None = None
    ) -> Array:
        """That a picture's tokens, norms and salience are those of the layers; returns the owner of each place."""
        pixels = self._pixels[group : group + 1]
        expected = merged_tower(self._tower, pixels, self.facts.num_blocks, merges, places)
        tokens = np.unique(expected.merged)
        rows = expected.rows[tokens]
        np.testing.assert_allclose(found["norms"][group], np.linalg.norm(rows, axis=1), rtol=1e-4)
        if self._normed:
            with torch.no_grad():
                rows = self._tower.post_layernorm(torch.from_numpy(rows)).numpy()
        np.testing.assert_allclose(found["tokens"][group], rows, atol=2e-4)
        if isinstance(self.facts, SiglipTower):
            salience = expected.attention[self.facts.salience_block].mean(axis=(0, 1))
        else:
            salience = expected.attention[-1][:, 0].mean(axis=0)
        np.testing.assert_allclose(found["salience"][group], salience[tokens], atol=1e-6)
        return expected.merged


@pytest.fixture
def towers(checkpoint: Callable[[str], Path], model: Callable[[str], Any]) -> Callable[[str], Towers]:
    return lambda name: Towers(name, checkpoint, model)


@pytest.mark.parametrize(("name", "dialect", "merges"), CASES)
def test_merged_tokens_are_places_with_equal_rows(
    name: str, dialect: DialectName, merges: Mapping[int, int], towers: Callable[[str], Towers], tmp_path: Path
) -> None:
    both = towers(name)
    build = cast("partial[None]", both.family.graphs([], ())["vision"])
    found = both.run(dialect, partial(build, merges=merges), tmp_path)
    for group in range(2):
        owner = both.assert_equal(found, group, merges)
        assert found["merged"][group].tolist() == owner.tolist()
        assert len(np.unique(owner)) == both.facts.tokens - sum(merges.values())


@pytest.mark.parametrize(("name", "dialect"), [("gqa-112", "opset24"), ("siglip-2", "opset20"), ("pi0", "opset24")])
def test_patches_that_are_left_out_change_nothing_else(
    name: str, dialect: DialectName, towers: Callable[[str], Towers], tmp_path: Path
) -> None:
    both = towers(name)
    # Each picture its own.
    draw, tokens = np.random.default_rng(0).permuted, both.facts.tokens
    places = np.sort(draw(np.tile(np.arange(tokens), (2, 1)), axis=1)[:, : tokens * 2 // 3])
    found = both.run(dialect, both.family.other_towers[BARLESS_TOWER], tmp_path, places=places)
    for group in range(2):
        both.assert_equal(found, group, {}, places[group])


@pytest.mark.parametrize("tokens", [2, 7, 16])
@pytest.mark.parametrize("kind", ["equal", "zero", "pairs"])
def test_ties_go_to_the_earlier(kind: str, tokens: int, tmp_path: Path) -> None:
    key = {
        "equal": np.ones((tokens, 4)),
        "zero": np.zeros((tokens, 4)),
        "pairs": np.repeat(np.eye(16)[: -(-tokens // 2), :4] + 1e-3, 2, axis=0)[:tokens],
    }[kind].astype(np.float32)
    graph = new_graph("opset24")
    x = graph.input("x", ["G", 1 + tokens, 3])
    merging = Merging(graph, tokens, special=1)
    count = tokens // 2
    merged = merging.merge(x, graph.input("key", ["G", 2, 1 + tokens, 4]), count)
    graph.output("rows", merged, ["G", 1 + tokens - count, 3])
    merging.output()
    rows = np.random.default_rng(0).standard_normal((1, 1 + tokens, 3)).astype(np.float32)
    keys = np.broadcast_to(np.concatenate([key[:1], key]), (1, 2, 1 + tokens, 4))
    found = run(graph, tmp_path, {"x": rows, "key": keys})
    owner = join(np.arange(tokens), key if key.any() else np.ones_like(key), count)
    assert found["merged"][0].tolist() == owner.tolist()
    means = [rows[0, 1 + np.flatnonzero(owner == place)].mean(axis=0) for place in np.unique(owner)]
    np.testing.assert_allclose(found["rows"][0], [rows[0, 0], *means], atol=1e-6)


def test_merges_follow_the_published_counts() -> None:
    side: dict[str, Any] = {"image_size": 14, "patch_size": 14, "layer_norm_eps": 1e-5, "activation": "gelu"}

    def tower(kind: type[SquareTower], tokens: int, blocks: int, **more: Any) -> SquareTower:
        widths = {"hidden_size": 1024, "intermediate_size": 4096, "num_heads": 1}
        return kind(tokens=tokens, num_blocks=blocks, **widths, **side, **more)

    clip = tower(ViTTower, 576, 23)
    assert merges_of(clip) == {5: 92, 6: 92, 7: 92, 8: 92}
    assert merges_of(tower(ViTTower, 256, 6)) == {1: 128}
    assert sum(merges_of(tower(SiglipTower, 256, 27, salience_block=25)).values()) == 163 // 5 * 5
    # Its salience is that of a block before the tokens are merged.
    assert merges_of(tower(SiglipTower, 256, 2, salience_block=0)) == {}
    d, rows = 1024, 577
    assert vit_flops(clip, rows, {}) == 2 * 576 * 3 * 14**2 * d + 23 * 2 * (12 * rows * d * d + 2 * rows**2 * d)
    assert 0.53 < vit_flops(clip, rows, merges_of(clip)) / vit_flops(clip, rows, {}) < 0.55
