"""Builds that are killed, fail or are rejected by `--check`.

A killed build leaves the old engines or the new ones, and the next build reuses complete engines. Rejected engines
are not kept, and --move removes only graphs whose engines passed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import onnx
import pytest
from PIL import Image

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.engines_manifest import ENGINES, EnginesManifest, Limits, read_engines
from sinkprune.contract.errors import BundleError, EnginesError, NumericsError
from sinkprune.contract.files.folders import staging
from sinkprune.contract.files.manifest_file import file_specs
from sinkprune.contract.manifest import BUNDLE
from sinkprune.engines.build import UnfinishedBuild, build_engines
from sinkprune.engines.gate import recording
from sinkprune.engines.gate.comparing import Gate
from sinkprune.engines.gate.recording import GateQuestion
from sinkprune.engines.progress import BuildProgress
from sinkprune.engines.targets import BuildJob
from sinkprune.engines.targets.onnxruntime import OnnxRuntimeBuilder
from support.models.manifests import file_of
from support.programs.commands import assert_refused, kill_when, left, run, succeed
from support.programs.slow_cases import slow
from support.stand_ins.gate_faults import altered, one_weight, overflowing

Bundles = Callable[..., Path]
LIMITS = Limits(60, 10, 1)


class Counting(OnnxRuntimeBuilder):
    """Lists the graphs that it builds. At the graph `until` it calls `disturb`, which fails or alters the job."""

    def __init__(self, until: str | None = None, disturb: Callable[[BuildJob], BuildJob] | None = None) -> None:
        super().__init__()
        self.until, self.graphs, self._disturb = until, list[str](), disturb or break_down

    def build(self, job: BuildJob, output: Path, progress: BuildProgress) -> Any:
        if job.model.graph == self.until:
            output.write_bytes(b"half")
            job = self._disturb(job)
        self.graphs.append(job.model.graph)
        return super().build(job, output, progress)


def break_down(job: BuildJob) -> BuildJob:
    raise EnginesError("broken down.")


@pytest.fixture
def source(bundle: Bundles, tmp_path: Path) -> Path:
    """Return a copy of a bundle."""
    return Path(shutil.copytree(bundle("gqa-112", budgets=("retain-64",)), tmp_path / "bundle"))


def broken_build(source: Path, output: Path, until: str, **options: Any) -> Counting:
    """Run a build that fails at the graph `until`."""
    builder = Counting(until)
    with pytest.raises(EnginesError, match=r"broken down\. \d of \d engines are whole and wait in .* goes on from"):
        build_engines(read_bundle(source), output, builder, LIMITS, **options)
    assert not output.exists()
    return builder


def again(source: Path, output: Path, limits: Limits = LIMITS, **options: Any) -> tuple[Counting, EnginesManifest]:
    """Run the same build to its end."""
    builder = Counting()
    return builder, build_engines(read_bundle(source, whole=False), output, builder, limits, **options)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [".out.building/engines/engines/*", ".out.partial/old"])
def test_a_kill_leaves_whole_engines(moment: str, bundle: Bundles, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = (bundle("gqa-112"), "-o", output, "--target", "onnxruntime", "--force")
    succeed("sinkprune-build", *command, "--max-prompt", 70)
    kill_when(moment, tmp_path, "sinkprune-build", *command, "--max-prompt", 71)
    found = read_engines(output)
    found.verify()
    assert found.manifest.limits.prompt_tokens in (70, 71)
    succeed("sinkprune-build", *command)
    read_engines(output).verify()
    assert left(output) == []


@pytest.mark.parametrize("move", [slow(False), True])
def test_a_killed_build_goes_on(move: bool, source: Path, tmp_path: Path) -> None:
    """The killed build has its own process. With --move it has removed graphs from the bundle."""
    output = tmp_path / "out"
    command = (source, "-o", output, "--target", "onnxruntime", *(["--move"] if move else []))
    kill_when(".out.building/engines/engines/decoder_1.onnx.data", tmp_path, "sinkprune-build", *command)
    assert not output.exists()
    unfinished = tmp_path / ".out.building" / "engines"
    whole = json.loads((unfinished / "engines.json").read_text())["engines"]
    assert "decoder_0" in whole and "decoder_2" not in whole
    stamps = {name: (unfinished / engine["file"]).stat().st_mtime_ns for name, engine in whole.items()}
    assert (source / "graphs" / "decoder_0.onnx").exists() != move
    succeed("sinkprune-build", *command)
    found = read_engines(output)
    found.verify()
    for name, stamp in stamps.items():
        assert file_of(found, name).stat().st_mtime_ns == stamp, name
    assert source.exists() != move
    assert left(output) == []


def test_an_interrupt_says_what_is_kept(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, waits = len(read_bundle(source).manifest.graphs), f"wait in '{tmp_path / '.out.building'}': the same"

    def left_by(until: str | None) -> str:
        builder = Counting(until, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt) as interrupt:
            build_engines(read_bundle(source), tmp_path / "out", builder, LIMITS)
        return str(interrupt.value)

    first, _ = again(source, tmp_path / "other")
    assert left_by(first.graphs[0]) == "no engine was complete, so nothing was kept."
    assert left_by(first.graphs[2]) == f"2 of {graphs} engines are whole and {waits} command goes on from there."
    with monkeypatch.context() as patch:
        # All engines are built, and the folder is not in its place.
        patch.setattr(UnfinishedBuild, "copy_to", Mock(side_effect=KeyboardInterrupt))
        assert left_by(None) == f"{graphs} of {graphs} engines are whole and {waits} command goes on from there."
    assert not (tmp_path / "out").exists()
    assert again(source, tmp_path / "out")[0].graphs == []


def test_one_build_at_a_time_and_no_altered_engine_is_taken_up(source: Path, tmp_path: Path) -> None:
    broken_build(source, tmp_path / "out", "decoder_2")
    with staging(tmp_path / "out", "building", ENGINES):
        outcome = run("sinkprune-build", source, "-o", tmp_path / "out", "--target", "onnxruntime")
    assert_refused(outcome, "another command is writing")
    engine = tmp_path / ".out.building" / "engines" / "engines" / "decoder_0.onnx"
    engine.write_bytes(engine.read_bytes()[:-1] + b"x")
    second, manifest = again(source, tmp_path / "out")
    assert set(second.graphs) == set(manifest.engines)


def test_a_moved_bundle_goes_away_graph_by_graph(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    broken_build(source, output, "decoder_2", move=True)
    graphs = {path.name for path in (source / "graphs").rglob("*") if path.is_file()}
    assert "decoder_2.onnx" in graphs and "decoder_2.bin" in graphs
    assert not graphs & {"vision.onnx", "vision.bin", "decoder_1.onnx", "decoder_1.bin"}
    with pytest.raises(BundleError, match="is missing"):
        read_bundle(source)
    # Other commands that need the bundle's graphs lose nothing.
    with pytest.raises(EnginesError, match=r"holds graph 'vision' no more: .* is another, by limits"):
        again(source, output, Limits(61, 10, 1), move=True)
    with pytest.raises(EnginesError, match="holds graph 'vision' no more"):
        again(source, tmp_path / "elsewhere", move=True)
    _, manifest = again(source, output, move=True)
    assert not source.exists()
    read_engines(output).verify()
    assert "vision" in manifest.engines


def test_a_full_disk_is_reported_and_only_what_is_missing_is_built(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=0)

    def fill_disk(job: BuildJob) -> BuildJob:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
        return break_down(job)

    first, output = Counting("decoder_2", fill_disk), tmp_path / "out"
    with pytest.raises(
        EnginesError, match=r"the disk is full: the engine of graph 'decoder_2' .* same command again"
    ):
        build_engines(read_bundle(source), output, first, LIMITS, move=True)
    monkeypatch.undo()
    second, manifest = again(source, output, move=True)
    assert sorted(first.graphs + second.graphs) == sorted(manifest.engines)
    read_engines(output).verify()
    assert left(output) == []


@pytest.fixture
def gate(photo: Image.Image) -> Gate:
    return Gate(GateQuestion([photo], "What is on the table?"))


@pytest.mark.parametrize("move", [slow(False), True])
def test_a_refused_engine_is_not_kept(move: bool, source: Path, gate: Gate, tmp_path: Path) -> None:
    output = tmp_path / "out"

    def alter(job: BuildJob) -> BuildJob:
        return replace(job, model=altered(job.model, one_weight, tmp_path / "altered"))

    wrong = Counting("decoder_2", alter)
    with pytest.raises(EnginesError, match=r"the engine of graph 'decoder_2', by onnxruntime .* 'hidden_out'"):
        build_engines(read_bundle(source), output, wrong, LIMITS, gate=gate, move=move)
    assert not output.exists()
    whole = json.loads((tmp_path / ".out.building" / "engines" / "engines.json").read_text())["engines"]
    assert "decoder_1" in whole and "decoder_2" not in whole
    # With --move only the graphs of engines that passed are gone.
    assert (source / "graphs" / "decoder_2.onnx").exists()
    assert (source / "graphs" / "decoder_1.onnx").exists() != move
    honest, _ = again(source, output, gate=gate, move=move)
    assert "decoder_2" in honest.graphs and not set(honest.graphs) & set(whole)
    read_engines(output).verify()
    assert source.exists() != move
    assert left(output) == []


def test_what_was_not_checked_is_not_taken_up(source: Path, gate: Gate, tmp_path: Path) -> None:
    broken_build(source, tmp_path / "out", "decoder_2")
    second, manifest = again(source, tmp_path / "out", gate=gate)
    assert set(second.graphs) == set(manifest.engines)


def test_a_moved_bundle_must_have_been_recorded(source: Path, gate: Gate, tmp_path: Path) -> None:
    output = tmp_path / "out"
    broken_build(source, output, "decoder_2", gate=gate, move=True)
    shutil.rmtree(tmp_path / ".out.building" / "recording")
    with pytest.raises(EnginesError, match="its calls were not recorded"):
        again(source, output, gate=gate, move=True)
    assert not output.exists()


def test_too_little_memory_for_the_graphs(
    source: Path, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "available_bytes", lambda: 1_000_000)
    with pytest.raises(Exception, match=r"not enough memory: running the graphs of .* are free\. .*sinkprune-check"):
        again(source, tmp_path / "out", gate=gate)
    # Without --check no graph runs.
    again(source, tmp_path / "out")


def test_graphs_with_infinite_logits_are_rejected(source: Path, gate: Gate, tmp_path: Path) -> None:
    manifest = read_bundle(source).manifest
    head = onnx.load(source / "graphs" / "head.onnx", load_external_data=False)
    overflowing("logits", saturating=False)(head)
    onnx.save(head, source / "graphs" / "head.onnx")
    manifest.files.update({"graphs/head.onnx": file_specs(source)["graphs/head.onnx"]})
    BUNDLE.write(source, manifest)
    with pytest.raises(NumericsError, match="the ONNX graph 'head' gives values in 'logits' that are not finite"):
        again(source, tmp_path / "out", gate=gate)
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.building").exists()
