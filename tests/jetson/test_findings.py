"""Findings: what stops or slows models on a machine, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sinkprune.contract.bundle import read_bundle
from sinkprune.jetson.boards import preset_manifest, read_boards, read_presets
from sinkprune.jetson.doctor import build_table
from sinkprune.jetson.findings import Finding, library_findings, machine_findings, model_findings
from sinkprune.jetson.fit import ModelFit, TargetMachine, fit
from sinkprune.jetson.host import Library, Machine, PythonEnvironment, SystemFiles, read_machine
from sinkprune.runtime.backends.known import KNOWN, on_cpu
from support.stand_ins.board_trees import LIBRARIES as GOOD
from support.stand_ins.board_trees import PYTHON_OF_JETPACK_6 as PYTHON
from support.stand_ins.board_trees import agx_orin_jetpack_7_2, changed, orin_nano_jetpack_6_2, workstation

PYTHON_7 = replace(PYTHON, version="3.12.3")
BOARDS = read_boards()
VENV = "python3.10 -m venv --system-site"
JETPACK_6 = [pack for pack in BOARDS.jetpacks if pack.version == "6.2"]


def found(root: Path, python: PythonEnvironment = PYTHON) -> list[Finding]:
    return list(machine_findings(replace(read(root, python), disk_free_bytes=10**12), BOARDS))


def read(root: Path, python: PythonEnvironment = PYTHON) -> Machine:
    return read_machine(SystemFiles(root), python, BOARDS, root)


def only(findings: list[Finding], words: str) -> Finding:
    """Return the only finding with these words."""
    told = [finding for finding in findings if words in finding.found]
    assert len(told) == 1, findings
    return told[0]


def test_machines_in_order_have_none_and_a_board_as_it_comes_has_three(tmp_path: Path) -> None:
    assert found(agx_orin_jetpack_7_2(tmp_path / "agx"), PYTHON_7) == found(workstation(tmp_path / "pc")) == []
    findings = found(orin_nano_jetpack_6_2(tmp_path / "nano"))
    assert [finding.stops for finding in findings] == [False] * 3
    assert "sudo nvpmodel -m 2" in only(findings, "the power mode is 15W, not MAXN_SUPER").do
    assert "sudo jetson_clocks" in only(findings, "may fall to 306 of 1020 MHz").do
    assert "--swap" in only(findings, "its only swap is zram").do


@pytest.mark.parametrize(
    ("tree", "python", "words", "do"),
    [
        (workstation, replace(PYTHON, libraries={}), "no engine library is installed", "'.[cpu]'"),
        (orin_nano_jetpack_6_2, PYTHON_7, "TensorRT 10.3.0.30 is installed for Python 3.10, this is 3.12", VENV),
        (orin_nano_jetpack_6_2, replace(PYTHON, sees_system=False), "does not see the system's packages", VENV),
        (
            orin_nano_jetpack_6_2,
            replace(PYTHON, libraries={"tensorrt": Library("1", None)}),
            "neither cuda-python nor pycuda",
            "pip install 'cuda-python>=12,<13'",
        ),
        (
            orin_nano_jetpack_6_2,
            replace(PYTHON, libraries={**GOOD, "tensorrt": Library(None, "ImportError: libnvdla.so")}),
            "tensorrt is installed but does not import: ImportError: libnvdla.so",
            "reinstall",
        ),
    ],
)
def test_a_python_that_cannot_run_engines_stops(
    tree: Callable[[Path], Path], python: PythonEnvironment, words: str, do: str, tmp_path: Path
) -> None:
    finding = only(found(tree(tmp_path), python), words)
    assert finding.stops and do in finding.do


@pytest.mark.parametrize(
    ("files", "words", "stops"),
    [
        ({"usr/lib/python3.10/dist-packages/tensorrt/__init__.py": None}, "module is not installed", True),
        ({"etc/nv_tegra_release": None}, "names no release of Jetson Linux", True),
        ({"etc/nv_tegra_release": "# R35 (release), REVISION: 4.1"}, "35.4.1 belongs to no JetPack", True),
        ({"proc/device-tree/compatible": "acme,robot\0nvidia,tegra234\0"}, "with an unknown module", False),
        ({"etc/nvpmodel.conf": None, "var/lib/nvpmodel/status": None}, "power mode is unknown", False),
    ],
)
def test_what_a_board_lacks(files: dict[str, str | None], words: str, stops: bool, tmp_path: Path) -> None:
    assert only(found(changed(orin_nano_jetpack_6_2(tmp_path), files)), words).stops is stops


def fits(model: str, usable: int, path: Path | None = None, backend: str = "tensorrt") -> ModelFit:
    manifest = read_bundle(path).manifest if path else preset_manifest(model, read_presets()[model], "opset20")
    return fit(model, "bundle" if path else "preset", manifest, TargetMachine(backend, usable, None), (336, 336))


def test_too_little_memory_comes_with_what_would_fit(bundle: Callable[..., Path]) -> None:
    small = fits("llava-1.5-7b", 3 << 30)
    (finding,) = model_findings([small], 3 << 30)
    assert "'llava-1.5-7b' fits in no form: it needs at least 6." in finding.found
    assert finding.stops and "3.2 GB are available" in finding.found
    assert not list(model_findings([fits("llava-1.5-7b", 8 << 30)], 8 << 30))
    path = bundle("mha-336", "fp16", dialect="opset20")
    # Engines that fit, and cannot be built on a full disk
    manifest, full = read_bundle(path).manifest, TargetMachine("tensorrt", 1 << 40, None, disk_free=1 << 10)
    (finding,) = model_findings([fit("it", "bundle", manifest, full, (336, 336))], 1 << 40)
    assert "engines of 'it' cannot be built here" in finding.found
    assert finding.stops and finding.blocks(replace(small, name="it")) and not finding.blocks(small)
    assert not list(model_findings([fit("it", "engines", manifest, full, (336, 336))], 1 << 40))


@pytest.mark.parametrize(
    ("precision", "weights", "dialect", "words"),
    [
        ("fp16", None, "opset20", []),
        ("fp16", None, "opset24", ["has dialect opset24; TensorRT of JetPack 6.2 supports opset20"]),
        ("fp32", None, "opset20", ["builds attention in fp16 only"]),
        ("fp16", "uint4", "opset24", ["uint4 weights", "dialect opset24"]),
    ],
)
def test_what_tensorrt_of_the_jetpack_does_not_support(
    precision: str, weights: str | None, dialect: str, words: list[str], bundle: Callable[..., Path]
) -> None:
    model = fits("it", 0, bundle("mha-336", precision, weights=weights, dialect=dialect))
    findings = list(model_findings([model], 0, JETPACK_6))
    assert len(findings) == len(words)
    for finding, said in zip(findings, words, strict=True):
        assert said in finding.found
        assert finding.stops
    later = list(model_findings([model], 0, BOARDS.jetpacks[-1:]))
    assert not [finding for finding in later if "dialect" in finding.found]
    own = next(number for number, form in enumerate(model.forms) if form.exported)
    built = [str(cell) for cell in build_table(model).columns[-1].cells]
    # Without a known memory a form may fit; TensorRT refuses these in any.
    assert (built[own] == "no") == (precision == "fp32" or weights == "uint4"), built


@pytest.mark.parametrize(
    ("backend", "version", "dialect"),
    [
        ("ort-cpu", "1.24.4", "opset20"),
        ("ort-cpu+openvino", "1.9.0", "opset20"),
        ("ort-cpu", "1.25.0", "opset24"),
        ("ort-cpu", "2.0.0rc1", "opset24"),
        ("ort-cpu", "unknown", "opset24"),
        ("ort-cpu", None, "opset24"),
        ("openvino", "1.23.2", "opset24"),
    ],
)
def test_what_the_installed_onnxruntime_does_not_support(
    backend: str, version: str | None, dialect: str, bundle: Callable[..., Path]
) -> None:
    model = fits("it", 0, bundle("mha-336", "fp32"), backend=backend)
    findings = list(model_findings([model], 0, [], version))
    said = f"'it' has dialect opset24; the installed ONNX Runtime {version} supports opset20"
    assert [finding.found for finding in findings] == ([said] if dialect == "opset20" else [])
    assert all(finding.stops and "--dialect opset20" in finding.do for finding in findings)
    assert not list(model_findings([replace(model, dialect="opset20")], 0, [], version))
    # One finding, not another for the JetPack.
    assert len([*model_findings([model], 0, JETPACK_6, version)]) == (backend != "openvino")


def test_what_the_jetpacks_of_a_board_elsewhere_do_not_support(bundle: Callable[..., Path]) -> None:
    model, orin = fits("it", 0, bundle("mha-336", "fp16", dialect="opset24")), BOARDS.board("orin-nano-8gb")
    packs = [pack for pack in BOARDS.jetpacks if orin.sm in pack.sm]
    (finding,) = model_findings([model], 0, packs, elsewhere=True)
    assert finding.found == "'it' has dialect opset24; TensorRT of JetPack 6.1 and 6.2 supports opset20"
    assert "--dialect opset20" in finding.do and not finding.stops
    (finding,) = model_findings([replace(model, backend="ort-cpu")], 0, packs, elsewhere=True)
    assert "; ONNX Runtime for Python 3.10 of JetPack 6.1 and 6.2 supports opset20" in finding.found
    for other in (replace(model, dialect="opset20"), replace(model, backend="openvino"), fits("llava-1.1b", 0)):
        assert not list(model_findings([other], 0, packs, elsewhere=True))
    assert not list(model_findings([model], 0, packs[-1:], elsewhere=True))


def test_a_backend_whose_library_is_not_installed(tmp_path: Path) -> None:
    machine = read(workstation(tmp_path), replace(PYTHON, libraries={"onnxruntime": GOOD["onnxruntime"]}))
    models = [fits("llava-1.1b", 8 << 30, backend=name) for name in on_cpu()]
    findings = list(library_findings(machine, [*models, *models]))
    assert sorted((finding.backends, finding.found) for finding in findings) == [
        ((name,), f"'{name}' needs openvino, which is not installed")
        for name in ("openvino", "ort-cpu+openvino", "ort-cpu+openvino-prefill")
    ]
    assert all("'.[openvino]'" in finding.do and finding.stops for finding in findings)
    # `machine_findings` says that there is none at all.
    nothing = replace(machine, python=replace(machine.python, libraries={}))
    assert not list(library_findings(nothing, models))


def test_a_finding_blocks_what_needs_the_library(tmp_path: Path) -> None:
    findings, model = found(orin_nano_jetpack_6_2(tmp_path), PYTHON_7), fits("llava-1.1b", 8 << 30)
    tensorrt = only(findings, "this is 3.12")
    assert tensorrt.blocks(model) and not tensorrt.blocks(replace(model, backend="ort-cpu"))
    assert not only(findings, "the power mode").blocks(model)
    broken = replace(PYTHON, libraries={**GOOD, "openvino": Library(None, "ImportError: no")})
    openvino = only(found(workstation(tmp_path / "pc"), broken), "openvino is installed but does not import")
    blocked = {name for name in on_cpu() if openvino.blocks(replace(model, backend=name))}
    assert blocked == {name for name in on_cpu() if "openvino" in KNOWN[name].libraries}
