"""`sinkprune-build --check`: rejected engines are not kept, and --move removes only graphs whose engines passed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from PIL import Image

from sinkprune.contract import memory as system_memory
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.engines_manifest import Limits, read_engines
from sinkprune.contract.errors import EnginesError, NumericsError
from sinkprune.contract.files.manifest_file import file_specs
from sinkprune.contract.manifest import BUNDLE
from sinkprune.engines import command as engines_command
from sinkprune.engines.build import build_engines
from sinkprune.engines.gate import recording
from sinkprune.engines.gate.comparing import Gate
from sinkprune.engines.gate.recording import GateQuestion
from sinkprune.engines.progress import BuildProgress
from sinkprune.engines.targets import BuildJob
from sinkprune.engines.targets.onnxruntime import OnnxRuntimeBuilder
from support.programs.commands import assert_refused, left, run
from support.programs.slow_cases import slow, slow_except
from support.stand_ins.gate_faults import Alter, altered, one_weight, overflowing

LIMITS = Limits(60, 10, 1)


class Faulty(OnnxRuntimeBuilder):
    """Builds the graph `wrong` from an altered copy, or fails at it."""

    def __init__(self, wrong: str | None = None, alter: Alter | None = None, folder: Path | None = None) -> None:
        super().__init__()
        self.graphs, self._wrong, self._alter, self._folder = list[str](), wrong, alter, folder

    def build(self, job: BuildJob, output: Path, progress: BuildProgress) -> Any:
        self.graphs.append(job.model.graph)
        if job.model.graph == self._wrong:
            if self._alter is None or self._folder is None:
                raise EnginesError("broken down.")
            job = BuildJob(altered(job.model, self._alter, self._folder), job.optimisation_profiles)
        return super().build(job, output, progress)


@pytest.fixture
def source(bundle: Callable[..., Path], tmp_path: Path) -> Path:
    """Return a copy of a bundle."""
    return Path(shutil.copytree(bundle("gqa-112", budgets=("retain-64",)), tmp_path / "bundle"))


@pytest.fixture
def gate(photo: Image.Image) -> Gate:
    return Gate(GateQuestion([photo], "What is on the table?"))


@pytest.mark.parametrize(
    "target", slow_except({"onnxruntime+openvino"}, ["onnxruntime", "onnxruntime+openvino", "openvino"])
)
def test_a_checked_build(target: str, source: Path, photo_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    outcome = run("sinkprune-build", source, "-o", output, "--target", target, "--check", photo_file, "--json")
    assert outcome.code == 0, outcome.stderr
    assert json.loads(outcome.stdout)["checked"] is True
    engines = read_engines(output)
    engines.verify()
    assert len(engines.manifest.flags["checked"]) == 64
    assert left(output) == []
    text = engines_command._text(output, engines.manifest, None)
    assert f"\ncheck passed: {len(engines.manifest.engines)} engines\n" in text
    assert "check passed" not in engines_command._text(output, replace(engines.manifest, flags={}), None)


@pytest.mark.parametrize("move", [slow(False), True])
def test_a_refused_engine_is_not_kept(move: bool, source: Path, gate: Gate, tmp_path: Path) -> None:
    output = tmp_path / "out"
    wrong = Faulty("decoder_2", one_weight, tmp_path / "altered")
    with pytest.raises(EnginesError, match=r"the engine of graph 'decoder_2', by onnxruntime .* 'hidden_out'"):
        build_engines(read_bundle(source), output, wrong, LIMITS, gate=gate, move=move)
    assert not output.exists()
    whole = json.loads((tmp_path / ".out.building" / "engines" / "engines.json").read_text())["engines"]
    assert "decoder_1" in whole and "decoder_2" not in whole
    # With --move only the graphs of engines that passed are gone.
    assert (source / "graphs" / "decoder_2.onnx").exists()
    assert (source / "graphs" / "decoder_1.onnx").exists() != move
    honest = Faulty()
    build_engines(read_bundle(source, whole=False), output, honest, LIMITS, gate=gate, move=move)
    assert "decoder_2" in honest.graphs and not set(honest.graphs) & set(whole)
    read_engines(output).verify()
    assert source.exists() != move
    assert left(output) == []


def test_what_was_not_checked_is_not_taken_up(source: Path, gate: Gate, tmp_path: Path) -> None:
    with pytest.raises(EnginesError, match="broken down"):
        build_engines(read_bundle(source), tmp_path / "out", Faulty("decoder_2"), LIMITS)
    again = Faulty()
    manifest = build_engines(read_bundle(source), tmp_path / "out", again, LIMITS, gate=gate)
    assert set(again.graphs) == set(manifest.engines)


def test_a_moved_bundle_must_have_been_recorded(source: Path, gate: Gate, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(EnginesError, match="broken down"):
        build_engines(read_bundle(source), output, Faulty("decoder_2"), LIMITS, gate=gate, move=True)
    shutil.rmtree(tmp_path / ".out.building" / "recording")
    with pytest.raises(EnginesError, match="its calls were not recorded"):
        build_engines(read_bundle(source, whole=False), output, Faulty(), LIMITS, gate=gate, move=True)
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(["--check", "missing.jpg"], "missing.jpg", id="no file"),
        pytest.param(["--check", "coffee.jpg", "--check-prompt", " "], "the prompt is empty", id="empty prompt"),
        pytest.param(["--check-prompt", "What?"], "Add --check", id="prompt without picture"),
    ],
)
def test_wrong_questions_are_refused(
    options: list[str], said: str, source: Path, photo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(photo_file, "coffee.jpg")
    assert_refused(run("sinkprune-build", source, "-o", "out", "--target", "onnxruntime", *options), said)
    assert not Path("out").exists() and not Path(".out.building").exists()


def test_too_little_memory_for_the_graphs(
    source: Path, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "available_bytes", lambda: 1_000_000)
    command = (source, "-o", tmp_path / "out", "--target", "onnxruntime")
    with pytest.raises(Exception, match=r"not enough memory: running the graphs of .* are free\. .*sinkprune-check"):
        build_engines(read_bundle(source), tmp_path / "out", Faulty(), LIMITS, gate=gate)
    assert system_memory.available_bytes() > 1_000_000
    assert run("sinkprune-build", *command).code == 0


def test_graphs_with_infinite_logits_are_rejected(source: Path, gate: Gate, tmp_path: Path) -> None:
    manifest = read_bundle(source).manifest
    head = onnx.load(source / "graphs" / "head.onnx", load_external_data=False)
    overflowing("logits", saturating=False)(head)
    onnx.save(head, source / "graphs" / "head.onnx")
    manifest.files.update({"graphs/head.onnx": file_specs(source)["graphs/head.onnx"]})
    BUNDLE.write(source, manifest)
    with pytest.raises(NumericsError, match="the ONNX graph 'head' gives values in 'logits' that are not finite"):
        build_engines(read_bundle(source), tmp_path / "out", Faulty(), LIMITS, gate=gate)
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.building").exists()
