"""A manifest whose parts do not fit each other is a `BundleError`, before any engine is loaded or soon after."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BundleError
from sinkprune.contract.manifest import CHAT_TEMPLATE, EMBEDDING, TOKENIZER
from support.models.manifests import changed, manifest_data, refusal, write_data


@pytest.fixture
def copied(bundle: Callable[..., Path], tmp_path: Path) -> Path:
    """A bundle to damage."""
    return Path(shutil.copytree(bundle("gqa-112"), tmp_path / "bundle"))


def tamper(root: Path, place: tuple[Any, ...], value: Any) -> None:
    """Write `value` at `place` into the manifest."""
    write_data(root, changed(manifest_data(root), place, lambda container, key: container.update({key: value})))


def test_a_graph_without_a_sum_is_refused(copied: Path) -> None:
    data = manifest_data(copied)
    del data["files"]["graphs/head.onnx"]
    write_data(copied, data)
    assert "no size and sha256 for 'graphs/head.onnx'" in refusal(copied)


@pytest.mark.parametrize("name", [EMBEDDING, TOKENIZER, CHAT_TEMPLATE])
def test_a_bundle_that_does_not_list_a_file_every_bundle_has_is_refused(name: str, copied: Path) -> None:
    data = manifest_data(copied)
    del data["files"][name]
    write_data(copied, data)
    assert f"'{name}'" in refusal(copied)


@pytest.mark.parametrize("graph", ["sinkpruner/retain-64/sanitizer", "sinkpruner/retain-64/select_after_2"])
def test_a_plan_that_names_a_graph_the_bundle_lacks_is_refused(graph: str, copied: Path) -> None:
    data = manifest_data(copied)
    del data["graphs"][graph]
    write_data(copied, data)
    assert f"'{graph}'" in refusal(copied)


def test_a_plan_that_selects_where_the_decoder_is_not_cut_is_refused(copied: Path) -> None:
    data = manifest_data(copied)
    selects = next(iter(data["plans"]["sinkpruner"].values()))["select_after"]
    selects["99"] = selects.pop(next(iter(selects)))
    write_data(copied, data)
    assert "cut after" in refusal(copied)


@pytest.mark.parametrize("name", ["gqa-112", "qwen"])
def test_a_plan_that_keeps_some_tokens_without_a_sanitizer_is_refused(
    name: str, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    root = Path(shutil.copytree(bundle(name), tmp_path / "bundle"))
    budget = next(iter(manifest_data(root)["budgets"]))
    tamper(root, ("plans", "sinkpruner", budget, "sanitizer"), None)
    assert "no sanitizer to choose" in refusal(root)


@pytest.mark.parametrize("graph", ["vision", "projector", "decoder_0", "decoder_3", "head"])
def test_a_bundle_that_lacks_a_weight_graph_is_refused(graph: str, copied: Path) -> None:
    data = manifest_data(copied)
    del data["graphs"][graph]
    write_data(copied, data)
    assert f"'{graph}'" in refusal(copied)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("language_model.hidden_size", 128, "graph 'projector'"),
        ("language_model.num_layers", 9, "graph 'decoder_3'"),
        ("projector", None, "holds the graph 'projector', which nothing runs"),
        ("projector", "", "lacks the graph ''"),
        ("plans.sinkpruner.retain-64.sanitizer", "", "lacks the graph ''"),
        ("language_model.num_layers", 4096, "key_8"),
        ("language_model.num_heads", 8, "query float32[1, 4, 'S', 16], expected query float32[1, 8, None, 16]"),
        (
            "language_model.num_kv_heads",
            4,
            "key float32[1, 2, 'S', 16], expected key float32[1, 4, None, 16]",
        ),
        ("language_model.head_dim", 32, "graph 'decoder_0'"),
        ("language_model.vocab_size", 385, "logits float32[1, 384], expected logits float32[1, 385]"),
        ("precision", "fp16", "tokens float32['G', 64, 64], expected tokens float16[None, 64, 64]"),
        ("cache", "rows", "key_0 float32[1, 2, 'C', 16], expected key_0 float32[1, 2, 'S', 16]"),
        ("cut_after", [1, 2, 5], "select"),
        ("graphs.head.inputs", [{"name": "states", "dtype": "float32", "shape": [1, "S", 64]}], "expected none"),
        ("graphs.vision.outputs", [], "is none, expected tokens"),
    ],
)
def test_graphs_must_fit_facts_and_cuts(place: str, value: Any, said: str, copied: Path) -> None:
    tamper(copied, tuple(place.split(".")), value)
    assert said in refusal(copied)


def test_the_decoder_must_be_cut_where_its_graphs_are(copied: Path) -> None:
    data = manifest_data(copied)
    data["cut_after"], data["plans"] = [1, 2, 5], {"sinkpruner": {}}
    write_data(copied, data)
    assert "graph 'decoder_2'" in refusal(copied)


def test_a_plan_cannot_run_another_plans_graphs(copied: Path) -> None:
    plan = ("plans", "sinkpruner", "retain-64")
    tamper(copied, (*plan, "sanitizer"), "sinkpruner/retain-32/sanitizer")
    assert "kept_index" in refusal(copied) or "kept_tokens" in refusal(copied)
    tamper(copied, (*plan, "sanitizer"), "head")
    assert "graph 'head'" in refusal(copied)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("vision.tokens", 65),
        ("vision.tokens", "64"),
        ("vision.image_size", 224),
        ("vision.patch_size", 0),
        ("vision", {}),
        ("processor", {}),
        ("processor.resample", 99),
        ("processor.size", {"shortest_edge": "112"}),
        ("processor.size", {"shortest_edge": 10**6}),
        ("processor.crop_size", {"height": 112, "width": 126}),
        ("processor.image_mean", [0.5, 0.5]),
        ("processor.rescale_factor", "x"),
        ("processor.rescale_factor", 1e300),
        ("processor.rescale_factor", True),
        ("processor.image_std", [0, 1, 1]),
        ("processor.image_mean", [1e300, 0, 0]),
        ("processor.do_pad", "../x"),
        ("processor.do_rescale", None),
        ("processor.crop_size", {"height": 10**8, "width": 10**8}),
    ],
)
def test_the_image_side_must_fit_the_vision_graph(place: str, value: Any, copied: Path) -> None:
    tamper(copied, tuple(place.split(".")), value)
    with pytest.raises(BundleError, match=r"`processor`|`vision`|\$\.vision"):
        Pipeline.load(copied)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda vision: vision.pop("tokens"), r"\$\.vision: missing field 'tokens'"),
        (lambda vision: vision.update(depth=3), r"\$\.vision: unknown field 'depth'"),
    ],
    ids=["missing", "unknown"],
)
def test_a_tower_with_a_field_too_few_or_too_many_names_it(
    change: Callable[[Any], Any], said: str, copied: Path
) -> None:
    data = manifest_data(copied)
    change(data["vision"])
    write_data(copied, data)
    with pytest.raises(BundleError, match=said):
        read_bundle(copied)


def test_a_tower_of_another_family_is_refused_in_one_sentence(bundle: Callable[..., Path], copied: Path) -> None:
    tamper(copied, ("vision",), manifest_data(bundle("qwen"))["vision"])
    with pytest.raises(BundleError, match=r"holds the fields of QwenTower, .* a ViTTower\. Export it again\.$"):
        Pipeline.load(copied, check_sums=False)
