"""Every command and every Python snippet of the README and the docs runs as printed, on a machine without a GPU.

Commands run in a folder with the files of the demo, and with small checkpoints and bundles under the names of the
pages. A command that cannot run here has a row in `NOT_RUN` with the reason. Its options are parsed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sinkprune.demo.example_files import write_example_files
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.programs.commands import check_options, run
from support.programs.printed_commands import ALL, OUTPUT, Block, blocks, most_images
from support.programs.repository import ROOT

CHECKPOINTS = {
    "llava-hf/llava-1.5-7b-hf": "gqa-112",
    "./my-checkpoint": "gqa-112",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen",
    "lerobot/pi0_base": "pi0",
    "moojink/openvla-7b-oft-finetuned-libero-spatial": "openvla-oft",
}
"""The small checkpoint in place of a published one."""
BUNDLES = (
    *("llava-7b", "llava-7b-calibrated", "llava-7b-jetson", "llava-int4", "llava-methods"),
    *("engines", "engines-jetson", "qwen-7b", "policy", "oft"),
)
"""The names of bundles and engines that commands read. Each accepts as many images as its printed export."""
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen-7b": ("qwen", {"budgets": ("prune-80",), "max_frames": 8}),
    "policy": ("pi0", {"budgets": ("prune-80",)}),
    "oft": ("openvla-oft", {"budgets": ("prune-80",)}),
}
"""The small checkpoint of a bundle, and its options, where they are others than usual."""
GPU, MINUTES, SYSTEM = "needs a GPU", "takes minutes or gigabytes", "changes the system or needs the network"
PARTS = "needs files, keys or programs that only its reader has"
LOAD = "its answer depends on the machine's load: see tests/deadlines/test_deadline_requests.py"
NOT_RUN: dict[str, str] = {
    r"pip install": SYSTEM,
    r"make ": MINUTES,
    r"cd demo-output|source \.venv/bin/activate": "they prepare the shell for the other commands",
    r"sudo ": SYSTEM,
    r"jetson/setup\.sh": SYSTEM,
    r"docker |kubectl |helm ": SYSTEM,
    r"aiperf ": PARTS,
    r"vllm serve |export VLLM|build/vllm/bin/python ": "needs vLLM: see integrations/vllm/tests/test_engine.py",
    r"serve run ": "it ends when it is interrupted: see tests/runtime/test_ray_serve.py",
    r"python3\.11 -m venv|peers/bin/|converter/bin/|export PATH|CMAKE_ARGS": SYSTEM,
    r"benchmarks/|python benchmarks/|pytest -m gpu": MINUTES,
    r"python -m lmms_eval": PARTS,
    r"python -m sinkprune\.policies\.lerobot": "needs LeRobot: see tests/policies/lerobot/test_lerobot.py",
    r"python -m lerobot|lerobot-(record|rollout) ": PARTS,
    r"python demo/photo\.py": PARTS,
    r"mkdir others|python -m sinkprune\.demo\.write_scenes": MINUTES,
    r"openssl ": PARTS,
    r"sinkprune-build .*--target tensorrt": GPU,
    r"sinkprune-profile ENGINES": GPU,
    r"sinkprune-check ": GPU,
    r"sinkprune-profile .*--(power|rate|repeat 9|backend ort-cpu\+openvino)": MINUTES,
    r"sinkprune-export .*--random-weights": MINUTES,
    r"sinkprune-export (demo/)?pocket": MINUTES,
    r"sinkprune-export my-(gptq-or-awq|policy)": PARTS,
    r"sinkprune-export .*--sign": PARTS,
    r"sinkprune-run .*(--sha256 3f0c|--signed-by)": PARTS,
    r"sinkprune-(calibrate|evaluate) .*\bpocket": MINUTES,
    r"sinkprune-calibrate quantize ": MINUTES,
    r"sinkprune-calibrate attention robot-": "needs moments: see tests/calibration",
    r"sinkprune-replay ": PARTS,
    r"sinkprune-run .*--deadline-ms": LOAD,
    r"sinkprune-serve ": "it ends when it is interrupted: see tests/runtime/commands/test_serve_command.py",
}
"""By a pattern at the start of a command: the reason why it does not run here."""


ONCE = list({text: (place, text) for place, text in ALL}.values())
RUN = [(place, text) for place, text in ONCE if not any(re.match(pattern, text) for pattern in NOT_RUN)]
PARSED = [
    (place, text)
    for place, text in ONCE
    if text.startswith("sinkprune-") and (place, text) not in RUN and "..." not in text
]

SNIPPETS = [block for block in blocks() if block.language == "python"]


@pytest.fixture(scope="module")
def readers_folder(
    bundle: Callable[..., Path], checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a folder with the files of `make demo`, and bundles named as on the pages."""
    folder = tmp_path_factory.mktemp("reader")
    write_example_files(folder)
    for name, kind in CHECKPOINTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(checkpoint(kind))
    for name in BUNDLES:
        small, options = SMALL.get(name, ("gqa-112", {"budgets": ("retain-64", "retain-32")}))
        options = {"max_images": most_images(name), **options}
        (folder / name).symlink_to(bundle(small, **options))
    # As `make demo-robot` exports it.
    export_bundle(ExportRequest(str(ROOT / "demo" / "pocket-robot"), max_images=2), folder / "robot")
    return folder


@pytest.fixture
def here(readers_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder of one command, which may write there."""
    for path in readers_folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_is_known() -> None:
    assert len(ALL) > 60
    unknown = [text for _, text in RUN if not text.startswith("sinkprune-")]
    assert unknown == []
    for pattern in NOT_RUN:
        assert any(re.match(pattern, text) for _, text in ALL), f"no page prints a command of {pattern!r}"
    for start in OUTPUT:
        assert any(f"\n{block.text}".find(f"\n{start}") >= 0 for block in blocks() if not block.language), start


@pytest.mark.parametrize(("place", "text"), RUN, ids=lambda value: value[:60])
def test_a_printed_command_runs(place: str, text: str, here: Path) -> None:
    command, *words = shlex.split(text)
    if "-o" in words:
        (here / words[words.index("-o") + 1]).unlink(missing_ok=True)
    if command == "sinkprune-run":
        words += ["--max-new-tokens", "2"]
    if command == "sinkprune-profile":
        words += ["--repeat", "1", *([] if "--camera" in words else ["--new-tokens", "2"])]
    outcome = run(command, *words)
    assert outcome.code == 0, f"{place}: {text}\n{outcome.stderr}"


@pytest.mark.parametrize(("place", "text"), PARSED, ids=lambda value: value[:60])
def test_a_printed_command_s_options_exist(place: str, text: str, here: Path) -> None:
    check_options(*shlex.split(text))


def test_files_and_targets_that_commands_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = set(re.findall(r"^([a-z-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for place, text in ALL:
        for name in re.findall(
            r"(?:benchmarks|demo|jetson)/\w+\.(?:py|sh)|jetson/Dockerfile\.\w+|docs/containers/[\w.-]+", text
        ):
            assert (ROOT / name).is_file(), f"{place}: {text}"
        if text.startswith("make "):
            assert text.split()[1] in targets, f"{place}: {text}"
        for named in re.findall(r"(?:\.|sinkprune)\[([a-z,-]+)\]", text):
            assert set(named.split(",")) <= extras, f"{place}: {text}"


def test_nothing_advises_to_install_this_package_by_name() -> None:
    """No registry has the package, so the name may become a stranger's."""
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.[ps][yh]")]
    by_name = re.compile(r"pip install[^\n]*['\" ]sinkprune\b(?!\.)")
    assert [str(file) for file in files if by_name.search(file.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda block: f"{block.page}:{block.line}")
def test_a_python_snippet_runs_by_itself(snippet: Block, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # As in a new file: the snippet imports and loads all that it uses.
    exec(compile(snippet.text, f"{snippet.page}:{snippet.line}", "exec"), {})
