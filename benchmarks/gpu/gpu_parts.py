"""Prints why a part of benchmarks/gpu.sh cannot run on this machine, or nothing if it can.

    python benchmarks/gpu/gpu_parts.py kernels --folder OUTPUT/bundles

`dialect` in the place of a part prints the dialect of the installed TensorRT.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from sinkprune.contract.child_processes import find_program

LARGE_MODEL_GPU_BYTES = 20e9
TWO_LARGE_MODELS_GPU_BYTES = 40e9
LARGE_MODEL_DISK_BYTES = 20e9
SMALL_MODEL_DISK_BYTES = 8e9
_FIRST_OPSET24 = (10, 15)

Reason = str | None
"""Why a part cannot run; None if it can."""


def nvidia_smi(fields: str) -> str | None:
    """Return the fields of the first GPU from the driver's command, comma-separated; None without an answer."""
    command = find_program("nvidia-smi")
    if command is None:
        return None
    words = [command, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def gpu(folder: Path = Path()) -> Reason:
    """Check for a GPU by its driver's command, or without the command by CUDA itself."""
    if nvidia_smi("name") is not None:
        return None
    from sinkprune.contract.errors import BackendError
    from sinkprune.runtime.device.cuda import open_device

    try:
        open_device()
    except BackendError as error:
        return f"no GPU: neither nvidia-smi nor CUDA finds one ({str(error).partition('. ')[0]})"
    return None


def gpu_tests(folder: Path) -> Reason:
    """Check for pytest; tests without their library skip themselves."""
    return gpu() or _missing("pytest")


def kernels(folder: Path) -> Reason:
    """Check that PyTorch and our launcher reach the GPU."""
    return gpu() or _missing("torch", "onnx_ir") or _torch_without_gpu() or _missing_launcher()


def ort_cuda(folder: Path, disk: float = SMALL_MODEL_DISK_BYTES) -> Reason:
    """Check for ONNX Runtime's CUDA provider, and for the disk space of a bundle."""
    reason = gpu() or _missing("onnxruntime", "onnx_ir", "transformers")
    if reason is not None:
        return reason
    from sinkprune.runtime.backends.onnxruntime.library import import_onnxruntime

    if "CUDAExecutionProvider" not in import_onnxruntime("ort-cuda").get_available_providers():
        return "this ONNX Runtime has no CUDA provider: pip install onnxruntime-gpu, with onnxruntime removed"
    return _little_disk(folder, disk)


def large_model(folder: Path) -> Reason:
    """Check for the GPU memory of a model of seven billion weights in fp16."""
    reason = ort_cuda(folder, LARGE_MODEL_DISK_BYTES)
    if reason is not None:
        return reason
    return _little_memory(LARGE_MODEL_GPU_BYTES)


def next_to_pytorch(folder: Path) -> Reason:
    """Check for PyTorch on the GPU, for memory of two such models, and for the bundle of the part before."""
    reason = gpu() or _missing("torch", "transformers") or _torch_without_gpu()
    if reason is None and not (folder / "llava-1.5-7b" / "bundle.json").is_file():
        reason = "its bundle was not exported: see the log of ort-cuda-llava-1.5-7b"
    return reason or _little_memory(TWO_LARGE_MODELS_GPU_BYTES)


def pi0(folder: Path) -> Reason:
    """Check for PyTorch on the GPU, and for the memory of two policies of three billion weights."""
    return large_model(folder) or _missing("torch") or _torch_without_gpu()


def next_to_vllm(folder: Path) -> Reason:
    """Check for an environment with vLLM, which gpu.sh names, and for the memory of its model."""
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        return "no environment with vLLM was given, as a fourth argument"
    found = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if shutil.which(python) is None or subprocess.run([python, "-c", found], check=False).returncode:
        return f"there is no vLLM in the environment of '{python}'"
    return gpu() or _missing("torch", "transformers") or _little_memory(TWO_LARGE_MODELS_GPU_BYTES)


def gpu_memory() -> float | None:
    """Return the bytes of the GPU's memory, on a board those shared with the CPU; None if unknown."""
    total = (nvidia_smi("memory.total") or "").strip()
    if total.isdecimal():
        return float(total) * (1 << 20)
    found = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
    return float(found[1]) * 1024 if found and total else None


def tensorrt(folder: Path) -> Reason:
    """Check for full TensorRT, and for the disk space of a bundle."""
    return (
        gpu()
        or _missing("tensorrt", "onnx", "onnx_ir", "transformers")
        or _missing_launcher()
        or _little_disk(folder, SMALL_MODEL_DISK_BYTES)
    )


def tensorrt_gate(folder: Path) -> Reason:
    """Check for `sinkprune-build --check`, and for the exported bundle."""
    reason = tensorrt(folder)
    if reason is not None:
        return reason
    if not (folder / "tensorrt" / "bundle.json").is_file():
        return "its bundle was not exported: see the log of tensorrt-build"
    command = find_program("sinkprune-build")
    if command is None:
        return "there is no sinkprune-build in PATH"
    text = subprocess.run([command, "--help"], capture_output=True, text=True, check=False).stdout
    return None if "--check" in text else "this sinkprune-build has no --check"


def tensorrt_profile(folder: Path) -> Reason:
    """Check for built engines."""
    built = (folder / "engines" / "engines.json").is_file()
    return tensorrt(folder) or (None if built else "no engines were built: see the log of tensorrt-build")


def power(folder: Path) -> Reason:
    """Check for the library that measures joules."""
    return gpu() or _missing("pynvml")


def dialect(folder: Path) -> str:
    """Return the dialect of the installed TensorRT."""
    version = tuple(int(part) for part in import_module("tensorrt").__version__.split(".")[:2])
    return "opset24" if version >= _FIRST_OPSET24 else "opset20"


def _missing(*modules: str) -> Reason:
    """Return the first of `modules` that cannot be imported, and why."""
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            return f"'{module}' cannot be imported: {error}"
    return None


def _torch_without_gpu() -> Reason:
    torch = import_module("torch")
    if torch.cuda.is_available():
        return None
    return f"PyTorch {torch.__version__} reaches no GPU; it must be built for CUDA"


def _little_memory(needed: float) -> Reason:
    memory = gpu_memory()
    if memory is not None and memory >= needed:
        return None
    found = "an unknown size" if memory is None else f"{memory / 1e9:.0f} GB"
    return f"the GPU's memory has {found}, {needed / 1e9:.0f} GB are needed"


def _missing_launcher() -> Reason:
    """Check for one of the two Python packages that launch kernels."""
    return _missing("cuda.bindings") if _missing("pycuda") else None


def _little_disk(folder: Path, needed: float) -> Reason:
    free = shutil.disk_usage(folder).free
    return None if free >= needed else f"{free / 1e9:.0f} GB of disk are free, {needed / 1e9:.0f} GB are needed"


PARTS: dict[str, Callable[[Path], Reason]] = {
    "ort-cuda-llava-1.1b": ort_cuda,
    "ort-cuda-llava-1.5-7b": large_model,
    "pytorch-llava-1.5-7b": next_to_pytorch,
    "pytorch-pi0": pi0,
    "frames": ort_cuda,
    "vllm-llava-1.5-7b": next_to_vllm,
    "kernels": kernels,
    "gpu-tests": gpu_tests,
    "tensorrt-build": tensorrt,
    "tensorrt-gate": tensorrt_gate,
    "tensorrt-profile": tensorrt_profile,
}
"""The parts of gpu.sh in running order, each with its check."""
_QUESTIONS = {**PARTS, "power": power, "dialect": dialect}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print why a part cannot run; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part")
    parser.add_argument("--folder", type=Path, default=Path(), help="where bundles are made")
    options = parser.parse_args(arguments)
    if options.part not in _QUESTIONS:
        parser.error(f"'{options.part}' is no part, expected one of {', '.join(_QUESTIONS)}")
    reason = _QUESTIONS[options.part](options.folder)
    if reason is not None:
        sys.stdout.write(" ".join(reason.split()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
