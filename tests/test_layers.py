"""Within export/, runtime/ and jetson/ imports run one way: modules have layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from import_statements import PACKAGE, ROOT, imports, package_of

LAYERS: dict[str, tuple[str, ...]] = {
    "export": (
        "__init__ config_fields dialects limits packages precision presets progress requantised rounding",
        "calibrated_rounding quantisation_config",
        "weight_forms",
        "graph",
        "rewriting",
        "vit qwen2_5_vision qwen2_vision qwen3_vision llama",
        "pruning",
        "methods plan_files planning",
        "checkpoint text tokenizer",
        "quantised_weights repacked_form",
        "families",
        "source",
        "bundle_writer",
        "command",
    ),
    "runtime": (
        "__init__ answer answer_text block_chain chat_template cores display_matrix embedding fits grid_boxes heap "
        "image_settings images keyframe_index learnt metered_file onnxruntime_library openvino_library other_load "
        "pixel_values plot power processor prompt rotary sampling stop_strings "
        "frame_clock stopwatch stream template_environment template_meter tensorrt_library torchvision_resize turns",
        "device",
        "backends kv_cache",
        "clip video_file square_processor llava_next_processor qwen_processor window_index",
        "families",
        "pictures",
        "camera request context_length",
        "chain choices",
        "encoding prompt_rows decoding deadline",
        "decoder_times",
        "cost_measuring",
        "observer",
        "answering",
        "pipeline peak_memory stage_spans",
        "energy overlay",
        "profile rate rate_plot",
        "commands",
    ),
    "jetson": (
        "__init__ boards build_fit other_forms presets python_environment system_files times",
        "fit jetpack_files power_mode",
        "machine recommendation",
        "findings",
        "next_steps",
        "report",
        "model_tables",
        "tables",
        "commands",
    ),
}
"""The modules and packages of a folder, lowest first: none imports one of a layer above."""
APART = {"export": ("pruning methods plan_files planning", "vit qwen2_5_vision qwen2_vision qwen3_vision llama")}
"""Modules and packages of a folder that stand side by side: neither imports the other."""


def wrong_ways(folder: str, sources: Mapping[Path, str]) -> list[str]:
    """What is wrong with how modules of `folder`, by their paths in the repository, import each other."""
    height = {part: number for number, layer in enumerate(LAYERS[folder]) for part in layer.split()}
    modules = {".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__"): path for path in sources}
    found, needs = [], {}
    for name, path in modules.items():
        part, needs[name] = name.split(".")[0], set[str]()
        if part not in height:
            found.append(f"{path} is in no layer of {folder}/")
            continue
        for imported in imports(sources[path], package_of(ROOT / path)):
            wanted = _known(imported.module.removeprefix(f"{PACKAGE}.{folder}."), modules)
            other = wanted.split(".")[0]
            sides = [{part, other} & set(side.split()) for side in APART.get(folder, ())]
            if height.get(other, 0) > height[part]:
                found.append(f"{path}, line {imported.line}: {other} is of a layer above")
            if part != other and len(sides) == 2 and all(sides):
                found.append(f"{path}, line {imported.line}: {part} and {other} stand side by side")
            # A package may choose one of its own modules when it is called.
            if wanted != name and not (imported.in_function and wanted.startswith(f"{name}.")):
                needs[name].add(wanted)
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        found.append(f"a cycle: {' <- '.join(error.args[1])}")
    return found


def _known(name: str, modules: Collection[str]) -> str:
    """The module that `name` is or stands in; empty where it is none of `modules`."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


@pytest.mark.parametrize("folder", LAYERS)
def test_imports_within_a_folder_run_one_way(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert wrong_ways(folder, {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in files}) == []
    parts = {path.relative_to(ROOT / folder).with_suffix("").parts[0] for path in files}
    declared = [part for layer in LAYERS[folder] for part in layer.split()]
    assert sorted(parts) == sorted(declared)


@pytest.mark.parametrize(
    ("sources", "complaint"),
    [
        ({"graph.py": "from sinkprune.export.pruning import shares", "pruning/shares.py": ""}, "layer above"),
        (
            {"graph.py": "def f():\n    import sinkprune.export.text", "text.py": ""},
            "line 2: text is of",
        ),
        ({"pruning/shares.py": "from ..methods import load_method", "methods/__init__.py": ""}, "layer above"),
        ({"__init__.py": "from . import graph", "graph.py": ""}, "layer above"),
        ({"pruning/plan.py": "from sinkprune.export.vit import ViT", "vit.py": ""}, "pruning and vit stand side"),
        ({"llama.py": "from .pruning.plan import UpTo", "pruning/plan.py": ""}, "llama and pruning stand side"),
        ({"pruning/a.py": "from . import b", "pruning/b.py": "from .a import c"}, "a cycle: pruning."),
        ({"text.py": "from . import checkpoint", "checkpoint.py": "def f():\n    from . import text"}, "a cycle"),
        ({"methods/__init__.py": "from .dart import x", "methods/dart.py": "from . import y"}, "a cycle"),
        ({"clip.py": ""}, "in no layer"),
    ],
)
def test_a_wrong_way_is_found(sources: dict[str, str], complaint: str) -> None:
    found = wrong_ways("export", {Path("export", path): source for path, source in sources.items()})
    assert any(complaint in line for line in found), found


def test_a_package_may_choose_one_of_its_modules() -> None:
    choosing = "def f():\n    from sinkprune.runtime.device.cuda_python import CudaPythonDevice"
    chosen = "from sinkprune.runtime.device import Address"
    sources = {Path("runtime/device/__init__.py"): choosing, Path("runtime/device/cuda_python.py"): chosen}
    assert wrong_ways("runtime", sources) == []
