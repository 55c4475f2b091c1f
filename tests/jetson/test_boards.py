"""Boards: every fact has a source, and the device tree identifies a board."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.checks import from_json, to_json
from sinkprune.contract.precision import WeightsName
from sinkprune.contract.schedule import schedule
from sinkprune.export.checkpoint.presets import PRESETS, SAME_SHAPES
from sinkprune.export.families import read_family
from sinkprune.jetson.boards import PresetFacts, preset_manifest, read_boards, read_presets
from sinkprune.jetson.fit import manifest_in_form
from sinkprune.runtime.families import load_family
from support.models.preset_facts import facts_of, weight_graphs, written
from support.programs.repository import ROOT
from support.programs.slow_cases import each_once


def test_a_board_is_found_by_its_device_tree() -> None:
    boards = read_boards()
    words = ["nvidia,p3768-0000+p3767-0005-super", "nvidia,p3767-0005", "nvidia,tegra234", ""]
    assert boards.name_of(words) == "orin-nano-8gb"
    assert boards.name_of(["nvidia,tegra234"]) is boards.name_of([]) is None
    named = [word for board in boards.boards.values() for word in board.compatible]
    assert len(named) == len(set(named))


def test_the_jetpack_of_a_release_of_linux() -> None:
    known = {"36.4": "6.1", "36.4.3": "6.2", "38.2.1": "7.0", "39.2.1": "7.2", "35.6.2": None, "38.1": None}
    found = {l4t: read_boards().jetpack(l4t) for l4t in known}
    assert {l4t: jetpack and jetpack.version for l4t, jetpack in found.items()} == known


def test_the_file_holds_what_the_export_has() -> None:
    # Else: python tests/support/models/preset_facts.py
    assert (ROOT / "jetson" / "presets.json").read_text(encoding="utf-8") == written()
    assert read_presets().keys() == PRESETS.keys()


@pytest.mark.parametrize("name", ["gqa-112", "next", "qwen", "pi0", "pi0.5"])
def test_a_preset_s_manifest_is_the_one_of_its_bundle(
    name: str, bundle: Callable[..., Path], checkpoint: Callable[[str], Path]
) -> None:
    real = read_bundle(bundle(name, "fp16")).manifest
    config = json.loads((checkpoint(name) / "config.json").read_text(encoding="utf-8"))
    planned = preset_manifest(name, from_json(PresetFacts, to_json(facts_of(name, config))), "opset24")
    for field in ("family", "language_model", "vision", "projector", "precision", "cut_after", "budgets"):
        assert getattr(planned, field) == getattr(real, field)
    assert (planned.policy and planned.policy.expert) == (real.policy and real.policy.expert)
    layouts = list(load_family(planned).largest().values())
    for budget in ["none", *planned.budgets]:
        ours, theirs = (schedule(manifest, "sinkpruner", budget, layouts) for manifest in (planned, real))
        assert ours.pictures == theirs.pictures
    weights = set(real.graphs) & set(planned.graphs)
    assert weights >= {"vision", *(f"decoder_{number}" for number in range(3)), real.last_graph}
    assert ("modulation" in weights) == bool(real.policy and real.policy.modulates)
    for graph in weights:
        # A file has gaps up to a page before each tensor.
        assert planned.weight_bytes(graph) == pytest.approx(real.weight_bytes(graph), abs=40 * 4096)


OWN = [name for name in PRESETS if name not in SAME_SHAPES]


@pytest.mark.parametrize(("name", "form"), each_once(OWN, ["int8", "int4", "uint4"]))
def test_sizes_in_another_form_are_those_of_the_export(name: str, form: WeightsName) -> None:
    manifest = preset_manifest(name, read_presets()[name], "opset24")
    other = manifest_in_form(manifest, "fp16", form)
    graphs = weight_graphs(read_family(name, PRESETS[name]), form, "int8")
    for graph, built in graphs.items():
        if graph == "decoder_1":
            # The last layer: `test_a_chunk_by_hand` has what a policy computes of it.
            continue
        layers = len(other.segments[0]) if graph == "decoder_0" else 1
        # These have weights in floats in every form: a first convolution, positions, norms, a layer of few numbers.
        near = 0.02 if graph in ("vision", "projector", "state_projector") else 0.003
        assert other.weight_bytes(graph) / layers == pytest.approx(built.bytes, rel=near)
    assert (other.weights.decoder, other.weights.vision, other.precision) == (form, "int8", "fp16")
    assert other.weights.block_size == (None if form == "int8" else 128)
    back = manifest_in_form(other, "fp16", "fp16")
    for graph in back.graphs:
        assert back.weight_bytes(graph) == pytest.approx(manifest.weight_bytes(graph), abs=8)


def test_every_fact_has_a_source_and_figures_are_marked_as_unverified() -> None:
    boards = read_boards()
    for owner in (*boards.boards.values(), boards.system_memory):
        facts = {field.name for field in fields(owner)} - {"module", "sources"}
        known = {fact for fact in facts if getattr(owner, fact) not in (None, ())}
        assert known == owner.sources.keys() and {*owner.sources.values()} <= boards.sources.keys()
    assert {jetpack.source for jetpack in boards.jetpacks} <= boards.sources.keys()
    releases = [[int(part) for part in jetpack.first_l4t.split(".")] for jetpack in boards.jetpacks]
    assert releases == sorted(releases)
    assert all(source.url.startswith("https://") for source in boards.sources.values())
    figures = {board.sources["fp16_tflops"] for board in boards.boards.values()}
    assert all("verify before quoting" in boards.sources[source].checked for source in figures)
