"""The memory that a command needs: estimated well, printed beforehand, and an error where it is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BackendError
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.memory import MemoryNeed, available_bytes, compared_sizes, running_need
from sinkprune.contract.precision import WeightsName
from sinkprune.contract.schedule import schedule
from sinkprune.runtime.backends.known import KNOWN, on_cpu
from sinkprune.runtime.commands.options import free_bytes
from sinkprune.runtime.device import cuda
from sinkprune.runtime.families import load_family
from support.programs.slow_cases import every

Bundles = Callable[..., Path]
# Under a limit of so many bytes beyond what the process has; prints the peak of one without.
_PROGRAM = """
import re, resource, sys
from pathlib import Path
from importlib import import_module
from sinkprune.command import VERBS
room, command, *arguments = sys.argv[1:]
chosen = import_module(VERBS[command].module)
if command == "serve":
    from sinkprune.serving import app
if int(room):
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + int(room),) * 2)
code = chosen.main(arguments)
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
sys.exit(code)
"""


def in_own_process(room: int, command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", _PROGRAM, str(room), command, *map(str, arguments), "--backend", "ort-cpu"]
    # Each further arena of malloc takes 64 MiB of address space, as soon as a thread happens to need one.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    return subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)


def need_of(manifest: Manifest, backend: str = "ort-cpu", built: bool = False) -> MemoryNeed:
    layouts = [next(iter(load_family(manifest).largest().values()))]
    rows = schedule(manifest, "sinkpruner", "none", layouts)
    return running_need(manifest, KNOWN[backend].memory, built=built, layouts=layouts, planned=rows, tokens=80)


def test_weights_are_counted_as_the_backend_holds_them(bundle: Bundles) -> None:
    for form, held in (("fp32", 1.0), ("int8", 1.4), ("int4", 1.2)):
        manifest = read_bundle(bundle("gqa-112", weights=form)).manifest
        need = need_of(manifest)
        bytes_of = {graph: manifest.weight_bytes(graph) for graph in manifest.graphs}
        vision = 1.0 if form == "fp32" else 1.4
        others = sum(bytes_of.values()) - bytes_of["vision"]
        assert need.weights == pytest.approx(held * others + vision * bytes_of["vision"], rel=1e-6)
        lm = manifest.language_model
        assert need.cache == round(1.1 * 2 * lm.num_kv_heads * lm.head_dim * 4 * lm.num_layers * (64 + 80))
        assert need.loading > 0
        mapped = need_of(manifest, built=True)
        assert mapped.loading == 0
        # OpenVINO packs what it loads, of engines too.
        assert need_of(manifest, backend="openvino", built=True) == need_of(manifest, backend="openvino")


def test_what_the_tower_gives_beside_its_tokens_is_counted(bundle: Bundles) -> None:
    """DeepStack: the tower's rows, and the decoder's, whole and split by layer."""
    manifest = read_bundle(bundle("qwen3-vl")).manifest
    decoder, layout = manifest.graphs["decoder_0"], next(iter(load_family(manifest).largest().values()))
    left = tuple(tensor for tensor in decoder.inputs if tensor.name != "deepstack")
    assert len(left) == len(decoder.inputs) - 1
    graphs = {**manifest.graphs, "decoder_0": replace(decoder, inputs=left)}
    needs = [need_of(one) for one in (manifest, replace(manifest, graphs=graphs))]
    rows = layout.all_tokens + 2 * (layout.all_tokens + 80)
    added = rows * manifest.deepstack_width * 4
    assert needs[0].activations - needs[1].activations == pytest.approx(1.1 * added, abs=1)
    assert replace(needs[0], activations=0) == replace(needs[1], activations=0)


@pytest.mark.parametrize("backend", [name for name in KNOWN if name not in on_cpu()])
def test_a_gpu_holds_what_files_hold_and_a_gigabyte_beside(backend: str, bundle: Bundles) -> None:
    manifest = read_bundle(bundle("gqa-112", weights="int4")).manifest
    need, here = need_of(manifest, backend=backend), need_of(manifest)
    sizes = [manifest.weight_bytes(graph) for graph in manifest.graphs]
    assert (need.weights, need.loading) == (sum(sizes), max(sizes))
    assert (need.cache, need.activations) == (here.cache, here.activations)
    assert need.on_gpu and need.bytes > 1 << 30
    assert not here.on_gpu


def test_free_memory_is_that_of_the_device_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu() -> None:
        raise BackendError("no GPU")

    for opened, free in ((lambda: SimpleNamespace(memory=lambda: (5, 8)), 5), (no_gpu, 0)):
        monkeypatch.setattr(cuda, "open_device", opened)
        assert {free_bytes(name) for name in ("ort-cuda", "tensorrt", "tensorrt-rtx")} == {free}
        for name in ("ort-cpu", "openvino"):
            assert free_bytes(name) == pytest.approx(available_bytes(), rel=0.2)


@pytest.mark.parametrize("command", every(2, ["run", "profile", "evaluate", "calibrate", "serve"]))
def test_too_little_memory_is_refused_with_both_numbers(command: str, bundle: Bundles, photo_file: Path) -> None:
    question: tuple[object, ...] = ("--image", photo_file, "--prompt", "What is this?")
    # Port 8000 may be in use.
    asked = {"run": question, "profile": question, "serve": ("--port", 0)}.get(command, ())
    done = in_own_process(80 << 20, command, bundle("gqa-112"), *asked)
    assert done.returncode == 2, done.stderr
    stderr = done.stderr
    assert stderr.count("\n") == 1
    assert stderr.startswith("error: not enough memory: '")
    assert re.search(r", (0\.1\d* GB|\d+ MB) are free", stderr)
    assert re.search(r"on ort-cpu needs about (0\.1\d* GB|\d+ MB) \(weights \d+ MB", stderr)
    assert "--weights int4" in stderr
    if command == "run":
        done = in_own_process(10 << 20, command, bundle("gqa-112", weights="int4"), *asked)
        assert "not enough memory" in done.stderr and "--weights int4" not in done.stderr


@pytest.mark.parametrize("form", ["fp32", "int8", "int4"])
def test_a_small_need_is_near_the_peak(form: WeightsName, bundle: Bundles, photo_file: Path) -> None:
    asked = ("--image", photo_file, "--fit", "pad", "--prompt", "What is this?", "--json", "--max-new-tokens", 4)
    done = in_own_process(0, "run", bundle("gqa-112", weights=form), *asked)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    answer, peak = done.stdout.splitlines()
    memory = json.loads(answer)["memory"]
    assert 0.7 <= memory["needed_bytes"] / (int(peak) * 1024) <= 1.4
    assert memory["free_bytes"] > memory["needed_bytes"]


def test_sizes_that_differ_look_different() -> None:
    assert compared_sizes(1_200_000_001, 1_200_000_000) == ["1.200000001 GB", "1.200000000 GB"]
    assert compared_sizes(3_100_000_000, 12_000_000) == ["3.1 GB", "12 MB"]
