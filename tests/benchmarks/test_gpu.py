"""`benchmarks/gpu.sh` and its programs without a GPU: with stand-ins, and on the processor with small shapes."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

import frames
import gpu_parts
import next_to_vllm
from rows_table import PARTS
from sinkprune.export.checkpoint.presets import PRESETS
from support.models.small_models import PI0_SHAPES
from support.programs.commands import succeed

SCRIPT = Path(gpu_parts.__file__).parent.with_name("gpu.sh")
H100 = "NVIDIA H100 80GB HBM3, 9.0, 81559, 570.86.15, 700.00"
"""The output of nvidia-smi for an H100."""
KERNELS = {"device": "NVIDIA H100", "us": {"kernels": [61.0, 60.0, 75.0], "plain PyTorch": [400.0] * 3}}
ROWS = {
    "PyTorch float16": {part: [46.0, 45.0, 90.5] for part in PARTS},
    "ort-cuda none": {part: [109.0] * 3 for part in PARTS},
    "ort-cuda retain-64": {part: [27.25, 26.0, 42.0] for part in PARTS},
}
VLLM = {"vLLM, CUDA graphs": {"ttft": [31.0, 30.0, 35.0], "per_token": [5.0, 4.5, 5.5]}}
FRAME = {"frame": "1920x1080", "processor": "LLaVA, crop", "difference": 0.0}
FRAME |= {"graph_ms": [0.8, 0.7, 0.9], "host_ms": [15.0] * 3}
TESTS = (
    '<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests"><testsuite name="pytest" errors="0" '
    'failures="{failed}" skipped="2" tests="{tests}" time="61.2"><testcase name="a"><skipped type="pytest.skip" '
    "message=\"could not import 'tensorrt'\">x</skipped></testcase></testsuite></testsuites>"
)
"""What pytest writes for --junitxml."""
_PYTHON = """#!/bin/bash
case $1 in
    */gpu_parts.py) cat "{folder}/why/$2" 2>/dev/null || true ;;
    */gpu_results.py) exec "{python}" "$@" ;;
    -m) cp "{folder}/gpu-tests.xml" "${{@: -1}}"; echo "2 skipped"; exit {tests_code} ;;
    */sanitizer_kernels.py) cp "{folder}/kernels.json" "$3" ;;
    */next_to_pytorch.py) cp "{folder}/rows.json" "$5" ;;
    */frames.py) cp "{folder}/frames.json" "${{@: -1}}" ;;
    */next_to_vllm.py) [ "$3" = --write ] && mkdir "$2" || cp "{folder}/vllm.json" "$4" ;;
    *) echo "unexpected: $*"; exit 9 ;;
esac
"""
_COMMANDS = {
    "nvidia-smi": f'echo "{H100}"',
    "sinkprune-export": 'echo "export $*"; mkdir -p "${@: -1}"',
    "sinkprune-build": 'echo "build $*"',
    "sinkprune-profile": 'while [ "$1" != --json ]; do shift; done; cp "$HERE/profile.json" "$2"',
}


@pytest.fixture(scope="module")
def profile_json(bundle: Callable[..., Path], photo_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of two budgets, as the command writes it."""
    path = tmp_path_factory.mktemp("report") / "profile.json"
    ask = ("--image", photo_file, "--prompt", "What?", "--budgets", "none,retain-64", "--repeat", 1)
    succeed("sinkprune-profile", bundle("gqa-112"), *ask, "--new-tokens", 2, "--json", path)
    return path


class Rig:
    """A folder that stands for an environment with a GPU, and the outputs of a run in it."""

    def __init__(self, folder: Path, profile: Path) -> None:
        self.folder, self.out = folder / "bin", folder / "out put"
        (self.folder / "why").mkdir(parents=True)
        shutil.copy(profile, self.folder / "profile.json")
        (self.folder / "kernels.json").write_text(json.dumps(KERNELS))
        (self.folder / "frames.json").write_text(json.dumps([FRAME]))
        (self.folder / "vllm.json").write_text(json.dumps({"ms": VLLM}))
        (self.folder / "rows.json").write_text(json.dumps({"device": "NVIDIA H100", "ms": ROWS}))
        self.tests(failed=0, tests=12)
        for name, body in _COMMANDS.items():
            self.command(name, f'#!/bin/bash\nHERE="{self.folder}"\n{body}\n')

    def command(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def tests(self, failed: int, tests: int) -> None:
        (self.folder / "gpu-tests.xml").write_text(TESTS.format(failed=failed, tests=tests))
        code = 1 if failed else 0
        self.command("python", _PYTHON.format(folder=self.folder, python=sys.executable, tests_code=code))

    def missing(self, part: str, reason: str) -> None:
        (self.folder / "why" / part).write_text(f"{reason}\n")

    def run(self, *limit: str) -> tuple[int, str, dict[str, Any]]:
        """The exit code, what was printed and results.json."""
        environment = {**os.environ, "PATH": f"{self.folder}:/usr/bin:/bin"}
        words = ["bash", str(SCRIPT), str(self.out), str(self.folder / "python"), *(limit or ("600",))]
        words.append(str(self.folder / "python"))
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
        assert done.stderr == ""
        return done.returncode, done.stdout, json.loads((self.out / "results.json").read_text())


@pytest.fixture
def rig(tmp_path: Path, profile_json: Path) -> Rig:
    made = Rig(tmp_path, profile_json)
    made.missing("power", "'pynvml' cannot be imported")
    return made


def states(results: Mapping[str, Any]) -> dict[str, str]:
    return {name: part["state"] for name, part in results["parts"].items()}


def test_all_parts_run_and_are_reported(rig: Rig) -> None:
    rig.missing("dialect", "opset20")
    code, told, results = rig.run()
    assert code == 0 and set(states(results).values()) == {"run"} and [*results["parts"]] == [*gpu_parts.PARTS]
    assert results["machine"]["name"] == "NVIDIA H100 80GB HBM3"
    assert results["parts"]["kernels"]["found"]["plain PyTorch"] == [400.0, 400.0]
    table = (rig.out / "results.md").read_text()
    assert told.endswith(table)
    assert table.startswith("### NVIDIA H100 80GB HBM3 (compute capability 9.0, 80 GiB), driver 570.86.15, power ")
    assert "| `gpu-tests` | run | 10 passed, 0 failed, 2 skipped |" in table
    assert "| kernels | 61.0 | 75.0 |" in table
    assert table.count("| `retain-64` | 64, ") == 3
    assert "| ort-cuda retain-64 | 27.25 (26.00 to 42.00) | " in table
    assert "| llava-1.5-7b, `retain-64`, a token | at most 5.0 ms | 27.2, missed |" in table
    assert "over that of `none` | at most 0.286 (3.5 times as fast) | 0.25, met |" in table
    assert "| pi0, three cameras, the quickest budget's chunk | at most 32 ms | 27.2, met |" in table
    assert "| vLLM, CUDA graphs | 31.00 (30.00 to 35.00) | - | - | 5.00 (4.50 to 5.50) |" in table
    assert "| 1920x1080 | LLaVA, crop | 0.80 | 15.00 | 0 |" in table
    found = results["parts"]["ort-cuda-llava-1.5-7b"]["found"]["budgets"]
    ms = {name: {part: spread["median"] for part, spread in one["ms"].items()} for name, one in found.items()}
    share = (ms["retain-64"]["sanitizer"] + ms["retain-64"]["select"]) / ms["none"]["prefill"]
    assert found["retain-64"]["selection_share"] == pytest.approx(share) and found["none"]["selection_share"] == 0
    log = (rig.out / "tensorrt-build.log").read_text()
    assert "export llava-1.1b --random-weights --precision fp16 --dialect opset20" in log
    assert not (rig.out / "bundles").exists()


def test_tests_that_are_all_skipped_have_a_reason(rig: Rig) -> None:
    rig.tests(failed=0, tests=2)
    code, _, results = rig.run()
    skipped = results["parts"]["gpu-tests"]
    assert (code, skipped["state"]) == (0, "not there")
    assert skipped["reason"] == "all 2 tests were skipped: could not import 'tensorrt'"


def test_after_the_limit_the_running_part_is_stopped_and_no_other_begins(rig: Rig) -> None:
    rig.command("sinkprune-profile", "#!/bin/bash\nsleep 60 & wait\n")
    code, told, results = rig.run("2")
    assert code == 1
    found = states(results)
    assert found.pop("ort-cuda-llava-1.1b") == "failed" and set(found.values()) == {"not there"}
    assert "pytorch-pi0: not there: no time was left of 2 seconds" in told


def test_parts_that_fail_or_are_not_there_stop_no_other(rig: Rig) -> None:
    reason, absent = "the GPU's memory has 8 GB, 20 GB are needed", ("ort-cuda-llava-1.5-7b", "pytorch-pi0")
    for part in absent:
        rig.missing(part, reason)
    rig.tests(failed=1, tests=12)
    rig.command("sinkprune-build", "#!/bin/bash\necho 'error: out of | memory'; exit 2\n")
    code, told, results = rig.run()
    assert code == 1 and f"ort-cuda-llava-1.5-7b: not there: {reason}\n" in told
    expected = dict.fromkeys(gpu_parts.PARTS, "run") | dict.fromkeys(absent, "not there")
    assert states(results) == expected | dict.fromkeys(("gpu-tests", "tensorrt-build", "tensorrt-gate"), "failed")
    assert results["parts"]["ort-cuda-llava-1.5-7b"]["found"] is None
    assert results["parts"]["tensorrt-build"]["reason"] == "exit code 2: error: out of | memory"
    table = (rig.out / "results.md").read_text()
    assert "| `tensorrt-build` | failed | exit code 2: error: out of / memory |" in table
    assert "| `gpu-tests` | failed | 9 passed, 1 failed, 2 skipped; exit code 1: 2 skipped |" in table
    assert "chunk | at most 32 ms | not measured |" in table


ON_CPU = ("--backend", "ort-cpu", "--device", "cpu", "--dtype", "float32", "--rounds", "1")


@pytest.mark.parametrize("part", [*gpu_parts.PARTS, "power"])
def test_without_a_gpu_each_part_has_a_reason(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_parts, "gpu", lambda folder=None: "no GPU: none")
    monkeypatch.setenv("VLLM_PYTHON", sys.executable)
    assert gpu_parts.main([part, "--folder", str(tmp_path)]) == 0
    reason = "no GPU: none" if not part.startswith("vllm") else "there is no vLLM in the environment of "
    assert capsys.readouterr().out.startswith(reason)


def test_frames_are_measured_and_written(tmp_path: Path) -> None:
    path = tmp_path / "frames.json"
    frames.main(["--rounds", "2", "--size", "64x48", "--threads", "1", "--json", str(path)])
    rows = json.loads(path.read_text())
    assert [row["frame"] for row in rows] == ["64x48"] * 3
    assert all(row["difference"] == 0 and len(row["graph_ms"]) == len(row["host_ms"]) == 2 for row in rows[:2])


SMALL = {
    "llava-1.5-7b": ("gqa-112", {"budgets": ("retain-64",)}, ("--frame", "64x48", "--new-tokens", "3")),
    "pi0": (min(PI0_SHAPES), {"budgets": ("prune-77.8",), "max_images": 3}, ("--new-tokens", "2")),
}
"""Small models in the place of presets, options of their export, and arguments."""


@pytest.mark.slow
@pytest.mark.parametrize("preset", SMALL)
def test_rows_next_to_pytorch(
    preset: str,
    bundle: Callable[..., Path],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import next_to_pytorch

    name, options, words = SMALL[preset]
    config = json.loads((checkpoint(name) / "config.json").read_text())
    monkeypatch.setitem(PRESETS, preset, config)
    root, path = bundle(name, **options), tmp_path / "rows.json"
    assert next_to_pytorch.main([preset, str(root), *ON_CPU, *words, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert {*report["ms"]} >= {"PyTorch float32, eager", "PyTorch float32, compiled", "ort-cpu none"}
    assert all(len(row[part]) == 1 for row in report["ms"].values() for part in PARTS)
    assert report["text_tokens"] > 0


def test_rows_of_vllm_come_from_its_own_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a stand-in of the library: what it is given, and what is computed of its times."""
    vllm = MagicMock(SamplingParams=SimpleNamespace)
    vllm.LLM.return_value.generate.side_effect = lambda prompt, params, use_tqdm: [
        SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * params.max_tokens)])
    ]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    (tmp_path / "config.json").write_text(json.dumps({"image_token_index": 32000}))
    like, path = tmp_path / "like.json", tmp_path / "vllm.json"
    like.write_text(json.dumps({"text_tokens": 41}))
    options = ["--rounds", "2", "--frame", "64x48", "--new-tokens", "5"]
    next_to_vllm.main([str(tmp_path), "--like", str(like), *options, "--json", str(path)])
    assert vllm.LLM.call_args.kwargs["load_format"] == "dummy"
    given = [call.args for call in vllm.LLM.return_value.generate.call_args_list]
    times = json.loads(path.read_text())["ms"][next_to_vllm.ROW]
    assert [len(times[part]) for part in ("ttft", "per_token")] == [2, 2]
    assert [params.max_tokens for _, params in given] == [1, 5] * (2 + next_to_vllm.WARM_UP)
    pictures = [prompt["multi_modal_data"]["image"] for prompt, _ in given]
    assert len({np.asarray(picture).tobytes() for picture in pictures}) == len(given)
    assert all(len(prompt["prompt_token_ids"]) == 42 for prompt, _ in given)
    assert given[0][0]["prompt_token_ids"].count(32000) == 1 and pictures[0].size == (64, 48)
    assert "| - | - |" in capsys.readouterr().out


@pytest.mark.slow
def test_the_checkpoint_for_vllm_has_a_processor_and_no_weights(
    tmp_path: Path, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    folder = tmp_path / "made"
    next_to_vllm.main([str(folder), "--write", "llava-1.5-7b"])
    assert not [*folder.glob("*.safetensors*")]
    processor = transformers.AutoProcessor.from_pretrained(folder)
    ids = processor(images=next_to_vllm.frame(0, (64, 48)), text="<image>What?", return_tensors="np")["input_ids"]
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (ids == config.image_token_id).sum() == 576
