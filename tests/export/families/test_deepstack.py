"""DeepStack of Qwen3-VL: its features reach the first segment, and no export or bundle loses them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BundleError
from support.models.manifests import manifest_data, write_data
from support.models.qwen_checkpoints import QwenShape, make_qwen_checkpoint
from support.programs.commands import assert_refused, run

Bundles = Callable[..., Path]


def test_a_decoder_that_would_be_cut_before_its_features_are_added_is_rejected(tmp_path: Path) -> None:
    make_qwen_checkpoint(tmp_path / "checkpoint", QwenShape(kind="qwen3_vl", num_layers=23))
    outcome = run("sinkprune-export", tmp_path / "checkpoint", "-o", tmp_path / "out", "--budgets", "prune-80")
    assert_refused(outcome, "drops tokens after layer 1", "DeepStack", "No stage may come before layer 2")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("graph", "role", "message"),
    [
        ("decoder_0", "inputs", "'decoder_0' does not take"),
        ("sinkpruner/prune-66.7/sanitizer", "outputs", "kept_deepstack"),
        ("vision", "outputs", "deepstack"),
    ],
)
def test_a_bundle_that_would_lose_the_features_is_rejected(
    graph: str, role: str, message: str, bundle: Bundles, tmp_path: Path
) -> None:
    shutil.copytree(bundle("qwen3-vl"), tmp_path / "bundle")
    manifest = manifest_data(tmp_path / "bundle")
    spec = manifest["graphs"][graph]
    spec[role] = [tensor for tensor in spec[role] if "deepstack" not in tensor["name"]]
    write_data(tmp_path / "bundle", manifest)
    with pytest.raises(BundleError, match=message):
        read_bundle(tmp_path / "bundle")
