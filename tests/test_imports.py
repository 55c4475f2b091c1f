"""The modules that imports load, and the place of the package. `make lint` checks imports between folders."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest

import sinkprune
from sinkprune.contract import errors
from sinkprune.runtime.backends.compatibility import BuiltEngines

HEAVY = {"torch", "torchvision", "transformers", "onnx", "onnx_ir", "onnxscript"}
ENGINE_LIBRARIES = {"onnxruntime", "openvino", "tensorrt", "tensorrt_rtx", "cuda", "pycuda"}
_ALL_MODULES = """
import sys, pkgutil, importlib
before = {name.split(".")[0] for name in sys.modules}
for folder in sys.argv[1:]:
    package = importlib.import_module(f"sinkprune.{folder}")
    for module in pkgutil.walk_packages(package.__path__, f"sinkprune.{folder}."):
        if not module.name.endswith((".kernels", ".lmms_eval_model")) and ".policies.lerobot." not in module.name:
            importlib.import_module(module.name)
print(*{name.split(".")[0] for name in sys.modules} - before)
"""
"""Imports all modules of some folders, without those for Triton, lmms-eval and LeRobot, and prints the packages."""


def loaded_by(code: str, *words: str) -> set[str]:
    """Return the words that a program prints in a new process."""
    program = [sys.executable, "-c", code, *words]
    return {*subprocess.run(program, capture_output=True, text=True, check=True).stdout.split()}


@pytest.mark.parametrize(
    ("folders", "unwanted"),
    [
        (("contract",), HEAVY | ENGINE_LIBRARIES),
        (("runtime", "jetson"), HEAVY | ENGINE_LIBRARIES),
        (("engines", "calibration"), ENGINE_LIBRARIES | {"torch", "transformers"}),
        (("export",), ENGINE_LIBRARIES),
    ],
)
def test_modules_import_large_libraries_when_they_are_called(folders: tuple[str, ...], unwanted: set[str]) -> None:
    loaded = loaded_by(_ALL_MODULES, *folders)
    assert {"sinkprune", "numpy"} <= loaded
    assert not unwanted & loaded
    if folders == ("contract",):
        # Only tables are drawn with rich.
        assert loaded <= {*sys.stdlib_module_names, "numpy", "rich", "sinkprune"}


def test_commands_and_public_names_load_few_modules() -> None:
    # Ctrl-C during these imports ends in a traceback.
    loaded = loaded_by(
        "import sys; before = set(sys.modules); import sinkprune.entry_points; print(*set(sys.modules) - before)"
    )
    assert {name for name in loaded if name.startswith("sinkprune")} == {
        *("sinkprune", "sinkprune.entry_points", "sinkprune.contract", "sinkprune.contract.errors"),
        *("sinkprune.contract.checks", "sinkprune.contract.command_line", "sinkprune.contract.command_line.command"),
    }
    assert {name.split(".")[0] for name in loaded} <= {*sys.stdlib_module_names, "sinkprune"}
    loaded = loaded_by("import sys, sinkprune; before = set(sys.modules); sinkprune.Pipeline; print(*before)")
    assert not {name.split(".")[0] for name in loaded} & (HEAVY | ENGINE_LIBRARIES | {"numpy", "PIL"})
    version = (
        "import sys; from sinkprune.entry_points import sinkprune\ntry: sinkprune()\nfinally: print(*sys.modules)"
    )
    loaded = loaded_by(version, "run", "--version")
    assert sinkprune.__version__ in loaded and not {"numpy", "rich", "PIL"} & loaded


_INNER = """
Backend Bundle BuiltEngines Counts Curve Drawable EncodedPicture Engine Frame Histogram PolicyFacts Prefill
PromptRows RecentRatios SampledFrames Sampler TowerInput UnopenedPicture Video
"""
"""Types of single steps and of parts of a bundle, which a program gets from a call and passes on."""


_LAZY = {"Tools": sinkprune.Tools, "ToolCall": sinkprune.ToolCall, "BuiltEngines": BuiltEngines}
"""What modules import for types only."""


def test_types_of_public_calls_and_results_are_public() -> None:
    def own_types(hint: Any) -> Iterator[type]:
        if isinstance(hint, type) and hint.__module__.startswith("sinkprune."):
            yield hint
        for argument in hint if isinstance(hint, list) else get_args(hint):
            yield from own_types(argument)

    hints = list[Any]()
    for name in sinkprune.__all__:
        public = getattr(sinkprune, name)
        members = [public, *(vars(public).values() if isinstance(public, type) else [])]
        for member in members:
            called = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if isinstance(called, type) or (inspect.isfunction(called) and not called.__name__.startswith("_")):
                hints += get_type_hints(called, localns=_LAZY).values()
    found = {kind.__name__ for hint in hints for kind in own_types(hint)}
    assert {"Answer", "Kept", "DeadlineReport", "ActionCosts"} <= found
    assert found - set(sinkprune.__all__) == {*_INNER.split()}


def test_every_exception_and_every_public_name_can_be_imported() -> None:
    of_module = [(name, kind) for name, kind in vars(errors).items() if isinstance(kind, type)]
    assert {name for name, kind in of_module if issubclass(kind, errors.SinkpruneError)} < {*sinkprune.__all__}
    assert all(getattr(sinkprune, name).__name__ == name for name in sinkprune.__all__)
    assert sinkprune.UsageError is errors.UsageError
    with pytest.raises(AttributeError, match="no attribute 'Pipelin'"):
        sinkprune.Pipelin  # type: ignore[attr-defined]  # noqa: B018
