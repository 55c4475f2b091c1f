"""Imports go downwards only, and the light folders stay light (the folder table of the design)."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import tomllib

import sinkprune
from import_statements import PACKAGE, ROOT, imports, package_of
from sinkprune import entry_points, runtime
from sinkprune.command import VERBS
from sinkprune.contract import errors

MAY_IMPORT: dict[str, set[str]] = {
    "contract": set(),
    "runtime": {"contract"},
    "engines": {"contract", "runtime"},
    "export": {"contract"},
    "calibration": {"contract", "runtime", "engines", "export", "demo"},
    "jetson": {"contract", "runtime", "engines"},
    "demo": {"contract", "export"},
}
"""Which of our folders each folder may import, itself aside."""
FOLDERS_WITHOUT_TORCH = {"contract", "runtime", "jetson"}
HEAVY = {"torch", "torchvision", "transformers", "onnx", "onnx_ir", "onnxscript"}
ENGINE_LIBRARIES = {"onnxruntime", "openvino", "tensorrt", "tensorrt_rtx", "cuda", "pycuda"}
LIGHTEST = {*sys.stdlib_module_names, "numpy"}
OPTIONAL = {"cryptography"}
"""What contract/ imports when it is asked for, and does without where it is not installed."""


def our_folder(module: str) -> str | None:
    """The folder a module of ours lies in, None for anybody else's."""
    root, *rest = module.split(".")
    if root != PACKAGE:
        return None
    return rest[0] if rest and rest[0] in MAY_IMPORT else None


def violations(source: str, folder: str, package: str) -> list[str]:
    """What is wrong with the imports of a module in `folder` whose package is `package`."""
    found = []
    for imported in imports(source, package):
        root, ours = imported.module.split(".")[0], our_folder(imported.module)
        if ours is not None and ours != folder and ours not in MAY_IMPORT[folder]:
            found.append(f"line {imported.line}: {folder}/ must not import {ours}/ ({imported.module})")
        if root in MAY_IMPORT:
            found.append(f"line {imported.line}: import {PACKAGE}.{root}, not {root}")
        if folder in FOLDERS_WITHOUT_TORCH and root in HEAVY:
            found.append(f"line {imported.line}: {folder}/ must not import {root}")
        optional = OPTIONAL if imported.in_function else set()
        if folder == "contract" and root not in {*LIGHTEST, *optional, PACKAGE}:
            found.append(f"line {imported.line}: {folder}/ needs the standard library and numpy only, not {root}")
        if root in ENGINE_LIBRARIES and not imported.in_function:
            found.append(f"line {imported.line}: import {root} inside a function only")
    return found


def source_files() -> list[Path]:
    return sorted(path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_folder_may(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    assert violations(path.read_text(encoding="utf-8"), folder, package_of(path)) == []


def test_the_rules_cover_every_folder_that_is_installed() -> None:
    links = {path.name: path for path in (ROOT / "src" / PACKAGE).iterdir() if path.is_symlink()}
    assert set(links) == set(MAY_IMPORT)
    for folder, link in links.items():
        assert link.readlink() == Path("..", "..", folder)
        assert (ROOT / folder / "__init__.py").is_file()


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_where_a_file_lies_is_what_it_is_imported_as(path: Path) -> None:
    name = ".".join([PACKAGE, *path.relative_to(ROOT).with_suffix("").parts])
    found = find_spec(name.removesuffix(".__init__"))
    assert found is not None
    assert found.origin is not None
    assert Path(found.origin).resolve() == path


def test_no_folder_may_import_one_that_may_import_it() -> None:
    for folder, allowed in MAY_IMPORT.items():
        assert all(folder not in MAY_IMPORT[other] for other in allowed)
        assert folder not in allowed


@pytest.mark.parametrize(
    ("folder", "source", "complaint"),
    [
        ("contract", "from sinkprune.runtime.pipeline import Pipeline", "must not import runtime/"),
        ("contract", "from sinkprune import runtime", "must not import runtime/"),
        ("contract", "from ..export import text", "must not import export/"),
        ("contract", "from .. import demo", "must not import demo/"),
        ("contract", "import PIL.Image", "standard library and numpy only, not PIL"),
        ("contract", "def f():\n    import safetensors", "line 2: contract/ needs the standard library"),
        ("contract", "import torch", "must not import torch"),
        ("contract", "import cryptography", "standard library and numpy only, not cryptography"),
        ("runtime", "import sinkprune.export.graph", "must not import export/"),
        ("runtime", "from ..export import graph", "must not import export/"),
        ("runtime", "def f():\n    from sinkprune.engines import build", "must not import engines/"),
        ("runtime", "def f():\n    import torch", "must not import torch"),
        ("runtime", "from transformers import AutoTokenizer", "must not import transformers"),
        ("runtime", "import onnx.helper", "must not import onnx"),
        ("runtime", "import onnx_ir as ir", "must not import onnx_ir"),
        ("runtime", "from onnxscript import script", "must not import onnxscript"),
        ("runtime", "if TYPE_CHECKING:\n    import torch", "must not import torch"),
        ("runtime", "try:\n    import torch\nexcept ImportError:\n    torch = None", "must not import torch"),
        ("runtime", "import importlib\nimportlib.import_module('torch.nn')", "must not import torch"),
        ("runtime", "def f():\n    return __import__('onnx')", "must not import onnx"),
        ("runtime", "import onnxruntime", "import onnxruntime inside a function only"),
        ("runtime", "try:\n    import onnxruntime\nexcept ImportError:\n    pass", "inside a function only"),
        ("runtime", "class A:\n    import tensorrt", "import tensorrt inside a function only"),
        ("runtime", "import json, tensorrt", "import tensorrt inside a function only"),
        ("runtime", "from cuda.bindings import runtime as cudart", "import cuda inside a function only"),
        ("runtime", "import export.graph", "import sinkprune.export, not export"),
        ("engines", "from sinkprune.export import text", "must not import export/"),
        ("engines", "from tensorrt import Builder", "import tensorrt inside a function only"),
        ("export", "from sinkprune.runtime.chain import encode", "must not import runtime/"),
        ("export", "from sinkprune.calibration import norms", "must not import calibration/"),
        ("calibration", "from sinkprune.jetson import power", "must not import jetson/"),
        ("jetson", "from sinkprune.export import text", "must not import export/"),
        ("jetson", "import torch", "must not import torch"),
        ("jetson", "from sinkprune.calibration import norms", "must not import calibration/"),
        ("runtime", "from sinkprune.jetson import boards", "must not import jetson/"),
        ("engines", "from sinkprune.jetson import boards", "must not import jetson/"),
        ("demo", "from sinkprune.jetson import power", "must not import jetson/"),
    ],
)
def test_a_violation_is_found(folder: str, source: str, complaint: str) -> None:
    found = violations(source, folder, f"{PACKAGE}.{folder}")
    assert len(found) >= 1
    assert any(complaint in line for line in found)


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        (
            "contract",
            "import json, numpy as np\nfrom sinkprune.contract.errors import BundleError\nfrom . import bundle",
        ),
        ("contract", "def f():\n    import cryptography"),
        ("runtime", "from sinkprune.contract.bundle import Bundle\nfrom PIL import Image\nfrom . import chain"),
        ("runtime", "def f():\n    import onnxruntime\n    from cuda.bindings import runtime"),
        ("runtime", "class A:\n    async def f(self):\n        import tensorrt"),
        ("runtime", "text = 'import torch'\n# import torch\nprint('import_module(\"torch\")')"),
        ("engines", "from sinkprune.runtime import Pipeline\nimport onnx"),
        ("export", "import torch, onnx, transformers\nfrom ..contract.manifest import Manifest"),
        (
            "calibration",
            "from sinkprune.export import text\nfrom sinkprune.engines import build\nimport torch",
        ),
        ("jetson", "from sinkprune.engines import build\nfrom sinkprune.runtime import Pipeline"),
        ("demo", "from sinkprune.export.bundle_writer import export_bundle\nimport torch"),
    ],
)
def test_what_is_allowed_is_not_complained_of(folder: str, source: str) -> None:
    assert violations(source, folder, f"{PACKAGE}.{folder}") == []


def test_relative_imports_are_resolved_against_their_package() -> None:
    found = imports(
        "from . import a\nfrom .b import c\nfrom .. import d\nfrom ...e import f",
        "sinkprune.runtime.backends",
    )
    assert [imported.module for imported in found] == [
        "sinkprune.runtime.backends.a",
        "sinkprune.runtime.backends.b.c",
        "sinkprune.runtime.d",
        "sinkprune.e.f",
    ]
    assert package_of(ROOT / "runtime" / "backends" / "ort.py") == "sinkprune.runtime.backends"
    assert package_of(ROOT / "contract" / "bundle.py") == "sinkprune.contract"


def test_importing_the_light_folders_loads_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys, sinkprune.contract.flops, sinkprune.runtime.pipeline, sinkprune.jetson.commands.doctor;"
        "print(*sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in result.stdout.split()}
    assert {"sinkprune", "numpy"} <= loaded
    assert not loaded & (HEAVY | ENGINE_LIBRARIES)


def test_onnxruntime_is_imported_in_one_place() -> None:
    # There its telemetry is switched off first.
    files = [*source_files(), *(ROOT / "benchmarks").rglob("*.py")]
    found = [
        path.relative_to(ROOT)
        for path in files
        for imported in imports(path.read_text(encoding="utf-8"), PACKAGE)
        if imported.module.split(".")[0] == "onnxruntime"
    ]
    assert found == [Path("runtime/onnxruntime_library.py")]


def test_commands_start_with_next_to_nothing_loaded(tmp_path: Path) -> None:
    # Until they are under way, Ctrl-C would end in a traceback.
    program = (
        "import sys; before = set(sys.modules); import sinkprune.entry_points; print(*set(sys.modules) - before)"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert {name for name in loaded if name.startswith(PACKAGE)} == {
        *("sinkprune", "sinkprune.contract", "sinkprune.contract.command", "sinkprune.contract.errors"),
        "sinkprune.contract.terminal",
        "sinkprune.entry_points",
    }
    assert {name.split(".")[0] for name in loaded} <= {*sys.stdlib_module_names, PACKAGE}


def test_every_command_starts_there() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert set(scripts) == {"sinkprune", *(f"sinkprune-{verb}" for verb in VERBS)}
    for name, place in scripts.items():
        assert place == f"sinkprune.entry_points:{name.removeprefix('sinkprune-')}"
        assert callable(getattr(entry_points, name.removeprefix("sinkprune-")))


def test_the_public_names_are_loaded_when_they_are_used(tmp_path: Path) -> None:
    program = "import sys, sinkprune; before = set(sys.modules); sinkprune.Pipeline; print(*before)"
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not {name.split(".")[0] for name in result.stdout.split()} & (HEAVY | ENGINE_LIBRARIES | {"numpy", "PIL"})


def test_every_exception_and_every_name_of_the_face_can_be_imported() -> None:
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.SinkpruneError)
    }
    assert kinds < set(sinkprune.__all__)
    assert all(getattr(sinkprune, name).__name__ == name for name in sinkprune.__all__)
    assert all(sinkprune.UsageError is kind for kind in (errors.UsageError, runtime.UsageError))
    with pytest.raises(AttributeError, match="no attribute 'Pipelin'"):
        sinkprune.Pipelin  # type: ignore[attr-defined]  # noqa: B018
