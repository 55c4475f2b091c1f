"""What speaks against a part of benchmarks/gpu.sh on this machine: prints the reason, or nothing where it can run.

    python benchmarks/gpu_parts.py kernels --folder OUTPUT/bundles

`dialect` in the place of a part prints the one that the installed TensorRT takes.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from sinkprune.contract.system.child_processes import find_program

LARGE_MODEL_GPU_BYTES = 20e9
LARGE_MODEL_DISK_BYTES = 20e9
SMALL_MODEL_DISK_BYTES = 8e9
_FIRST_OPSET24 = (10, 15)

Reason = str | None
"""Why something is not there; None where it is."""


def nvidia_smi(fields: str) -> str | None:
    """What the driver's command tells of the first GPU, comma-separated; None where it tells nothing."""
    command = find_program("nvidia-smi")
    if command is None:
        return None
    words = [command, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    told = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = told.stdout.splitlines()
    return lines[0] if told.returncode == 0 and lines else None


def gpu() -> Reason:
    """Whether there is a GPU, by its driver's command, or where that is missing by CUDA itself."""
    if nvidia_smi("name") is not None:
        return None
    from sinkprune.contract.errors import BackendError
    from sinkprune.runtime.device import open_device

    try:
        open_device()
    except BackendError as error:
        return f"no GPU: nvidia-smi tells of none, nor does CUDA ({str(error).partition('. ')[0]})"
    return None


def gpu_tests() -> Reason:
    """Whether the tests can be run; those that miss a library skip themselves."""
    return gpu() or _missing("pytest")


def kernels() -> Reason:
    """Whether PyTorch and our launcher reach the GPU."""
    reason = gpu() or _missing("torch", "onnx_ir")
    if reason is not None:
        return reason
    if not import_module("torch").cuda.is_available():
        return f"PyTorch {import_module('torch').__version__} reaches no GPU; it must be built for CUDA"
    return None if not _missing("cuda.bindings") or not _missing("pycuda") else _missing("cuda.bindings")


def ort_cuda(folder: Path, disk: float) -> Reason:
    """Whether ONNX Runtime has a CUDA provider, and a bundle can be made in `folder`."""
    reason = gpu() or _missing("onnxruntime", "onnx_ir", "transformers")
    if reason is not None:
        return reason
    from sinkprune.runtime.backends.onnxruntime.library import import_onnxruntime

    if "CUDAExecutionProvider" not in import_onnxruntime("ort-cuda").get_available_providers():
        return "this ONNX Runtime has no CUDA provider: pip install onnxruntime-gpu, with onnxruntime removed"
    free = shutil.disk_usage(folder).free
    return None if free >= disk else f"{free / 1e9:.0f} GB of disk are free, {disk / 1e9:.0f} GB are needed"


def large_model(folder: Path) -> Reason:
    """Whether a model of seven billion weights in fp16 fits too."""
    reason = ort_cuda(folder, LARGE_MODEL_DISK_BYTES)
    if reason is not None:
        return reason
    memory = gpu_memory()
    if memory is None or memory < LARGE_MODEL_GPU_BYTES:
        found = "an unknown size" if memory is None else f"{memory / 1e9:.0f} GB"
        return f"the GPU's memory has {found}, {LARGE_MODEL_GPU_BYTES / 1e9:.0f} GB are needed"
    return None


def gpu_memory() -> float | None:
    """Bytes of the GPU's memory; on a board those that it shares with the CPU. None where nothing tells."""
    told = (nvidia_smi("memory.total") or "").strip()
    if told.isdecimal():
        return float(told) * (1 << 20)
    found = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
    return float(found[1]) * 1024 if found and told else None


def tensorrt(folder: Path) -> Reason:
    """Whether full TensorRT is installed, and what it builds from can be made."""
    reason = gpu() or _missing("tensorrt", "onnx", "onnx_ir", "transformers")
    if reason is not None:
        return reason
    if _missing("cuda.bindings") and _missing("pycuda"):
        return _missing("cuda.bindings")
    free = shutil.disk_usage(folder).free
    disk = SMALL_MODEL_DISK_BYTES
    return None if free >= disk else f"{free / 1e9:.0f} GB of disk are free, {disk / 1e9:.0f} GB are needed"


def tensorrt_gate(folder: Path) -> Reason:
    """Whether this version has the gate, and the bundle to check was exported."""
    reason = tensorrt(folder)
    if reason is not None:
        return reason
    if not (folder / "tensorrt" / "bundle.json").is_file():
        return "its bundle was not exported: see the log of tensorrt-build"
    command = find_program("sinkprune-build")
    if command is None:
        return "there is no sinkprune-build in PATH"
    told = subprocess.run([command, "--help"], capture_output=True, text=True, check=False).stdout
    return None if "--check" in told else "this sinkprune-build has no --check"


def tensorrt_profile(folder: Path) -> Reason:
    """Whether engines were built."""
    built = (folder / "engines" / "engines.json").is_file()
    return tensorrt(folder) or (None if built else "no engines were built: see the log of tensorrt-build")


def power() -> Reason:
    """Whether joules can be measured beside the times."""
    return gpu() or _missing("pynvml")


def dialect() -> str:
    """The dialect that the installed TensorRT takes."""
    version = tuple(int(part) for part in import_module("tensorrt").__version__.split(".")[:2])
    return "opset24" if version >= _FIRST_OPSET24 else "opset20"


def _missing(*modules: str) -> Reason:
    """The first of `modules` that cannot be imported, and why."""
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            return f"'{module}' cannot be imported: {error}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what speaks against a part; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part")
    parser.add_argument("--folder", type=Path, default=Path(), help="where bundles are made")
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    parts: dict[str, Callable[[], Reason]] = {
        "gpu-tests": gpu_tests,
        "kernels": kernels,
        "ort-cuda-llava-1.1b": lambda: ort_cuda(folder, SMALL_MODEL_DISK_BYTES),
        "ort-cuda-llava-1.5-7b": lambda: large_model(folder),
        "tensorrt-build": lambda: tensorrt(folder),
        "tensorrt-gate": lambda: tensorrt_gate(folder),
        "tensorrt-profile": lambda: tensorrt_profile(folder),
        "power": power,
        "dialect": dialect,
    }
    if options.part not in parts:
        parser.error(f"'{options.part}' is no part, expected one of {', '.join(parts)}")
    reason = parts[options.part]()
    if reason is not None:
        sys.stdout.write(" ".join(reason.split()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
