"""Compiles the kernels for every GPU that they are shipped for, without a GPU, and writes `kernels.zip`.

Run `python -m sinkprune.engines.plugins.compile` after a change of `kernels.py` or of the tables below. A test fails
until then.

The archive holds a cubin and a PTX for each kernel, type of the tokens and sm. Cubins load without a compiler, and on
drivers older than the PTX. The PTX is for GPUs newer than the list. LZMA reduces the files to a seventh, and
`zipfile` reads them on any board.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from sinkprune.contract.checks import needs_package
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.errors import BackendError
from sinkprune.contract.files.output_files import check_writable, write_whole
from sinkprune.engines.plugins import launches
from sinkprune.engines.plugins.launches import ARCHIVE, INDEX

PTX_VERSIONS = {80: 80, 86: 80, 87: 80, 89: 80, 90: 80, 100: 86, 110: 90, 120: 87}
"""For each sm, the oldest PTX ISA that has it, but at least 8.0, which drivers since CUDA 12.0 compile."""
_SPECIFIC = {100}
"""The sms whose PTX runs on no other GPU, because Triton uses instructions of that GPU alone (redux.f32)."""
DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""The types of tokens, and their names in Triton."""
_DEPTH = {"float32": 16, "float16": 64, "bfloat16": 64}
"""The number of columns that are multiplied at a time; two stages of them fit into 48 KiB."""
# Inputs, integers, outputs.
_TOP_RHO = (
    {"norms": "*fp32", "tokens": "*{}"}
    | dict.fromkeys(("n", "width", "count"), "i32")
    | {"sink": "*{}", "outlier": "*i32"}
)
_DIVERSITY = (
    {"tokens": "*{}", "candidate": "*i32", "reserved": "*i64"}
    | dict.fromkeys(("n", "width", "reserves", "count", "batch", "first", "last"), "i32")
    | {"chosen": "*i64", "scratch": "*fp32"}
)


@dataclass(frozen=True)
class Configuration:
    """How one kernel is compiled, for all GPUs."""

    function: str
    """The kernel's name in `kernels.py`."""
    parameters: dict[str, str]
    """Triton's types of its arguments, `{}` for that of the tokens."""
    constants: dict[str, int]
    """The values of its compile-time arguments, by name."""
    warps: int
    """Warps of a block, of 32 threads each."""
    aligned: tuple[str, ...] = ()
    """Parameters that are multiples of 16."""


def configurations(dtype: str) -> dict[str, Configuration]:
    """Return how every kernel is compiled for tokens of `dtype`, by its name in `launches.py`."""
    phase = {"ROWS": launches.ROWS, "DEPTH": _DEPTH[dtype], "CHUNK": 1024}
    aligned = ("tokens", "width")
    return {
        "top_rho": Configuration("top_rho", _TOP_RHO, {"COLUMNS": launches.COLUMNS, "ROWS": 128, "CHUNK": 1024}, 4),
        "diversity_phase": Configuration("diversity_select", _DIVERSITY, phase, 4, aligned),
        "diversity_phase_unaligned": Configuration("diversity_select", _DIVERSITY, phase, 4),
    }


@dataclass(frozen=True)
class Compiled:
    """One kernel, compiled for one type of tokens and one sm."""

    entry: str
    """The name of the function in `ptx` and `cubin`."""
    threads: int
    """Threads of a block."""
    shared_bytes: int
    """Dynamic shared memory of a block, in bytes."""
    ptx: str
    cubin: bytes


def compile_kernel(kernel: str, dtype: str, sm: int) -> Compiled:
    """Compile `kernel` for tokens of `dtype` and GPUs of `sm`; raises `BackendError` if Triton is not installed."""
    triton = _triton()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sinkprune.engines.plugins import kernels

    configuration = configurations(dtype)[kernel]
    parameters = {name: kind.format(DTYPES[dtype]) for name, kind in configuration.parameters.items()}
    multiples = {(list(parameters).index(name),): [["tt.divisibility", 16]] for name in configuration.aligned}
    source = ASTSource(
        getattr(kernels, configuration.function),
        signature={**parameters, **dict.fromkeys(configuration.constants, "constexpr")},
        constexprs=configuration.constants,
        attrs=multiples,
    )
    options = {
        "num_warps": configuration.warps,
        "num_stages": 3,
        "ptx_version": PTX_VERSIONS[sm],
        "enable_fp_fusion": True,
    }
    with triton.knobs.compilation.scope():
        # Line information holds the names of this machine's folders.
        triton.knobs.compilation.disable_line_info = True
        made = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    text = _portable(_without_scratch(made.asm["ptx"], made.metadata.name, len(parameters)), sm)
    threads = 32 * made.metadata.num_warps
    return Compiled(made.metadata.name, threads, made.metadata.shared, text, _assemble(text, sm, triton))


def source_sha256() -> str:
    """Return the sha256 of the sources of the binaries: `kernels.py`, and how each kernel is compiled."""
    tables = {dtype: {k: asdict(c) for k, c in configurations(dtype).items()} for dtype in DTYPES}
    source = Path(__file__).with_name("kernels.py").read_bytes()
    return hashlib.sha256(source + json.dumps([tables, PTX_VERSIONS], sort_keys=True).encode()).hexdigest()


def archive(compiled: Iterator[tuple[str, str, int, Compiled]], triton_version: str) -> bytes:
    """Return the bytes of `kernels.zip` for `compiled` (kernel, dtype, sm, result); equal for equal content."""
    members: dict[str, bytes] = {}
    entries = []
    for kernel, dtype, sm, made in compiled:
        stem = f"{kernel}.{dtype}.sm_{sm}"
        members |= {f"{stem}.cubin": made.cubin, f"{stem}.ptx": made.ptx.encode()}
        entries.append(
            {
                "kernel": kernel,
                "dtype": dtype,
                "sm": sm,
                "entry": made.entry,
                "threads": made.threads,
                "shared_bytes": made.shared_bytes,
                "portable": sm not in _SPECIFIC,
                "cubin": f"{stem}.cubin",
                "ptx": f"{stem}.ptx",
                "sha256": hashlib.sha256(made.cubin + made.ptx.encode()).hexdigest(),
            }
        )
    index: dict[str, Any] = {"source_sha256": source_sha256(), "triton": triton_version, "entries": entries}
    members[INDEX] = json.dumps(index, indent=1).encode()
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_LZMA) as file:
        for name, data in members.items():
            # A new ZipInfo has no current date.
            file.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_LZMA)
    return buffer.getvalue()


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m sinkprune.engines.plugins.compile",
        description="Compile the plugin kernels for every GPU they are shipped for. Needs triton, but no GPU.",
    )
    here = Path(__file__).resolve().with_name(ARCHIVE)
    parser.add_argument("-o", "--output", type=Path, default=here, metavar="FILE.zip", help="default: in place")
    options = parser.parse_args(arguments)
    check_writable(options.output, (".zip",))
    data = archive(_all(), _triton().__version__)
    write_whole(options.output, data)
    sys.stdout.write(f"{options.output}: {len(data) / 1e6:.2f} MB\n")


def _all() -> Iterator[tuple[str, str, int, Compiled]]:
    jobs = [(kernel, dtype, sm) for sm in PTX_VERSIONS for dtype in DTYPES for kernel in configurations(dtype)]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for job, made in zip(jobs, pool.map(compile_kernel, *zip(*jobs, strict=True)), strict=True):
            sys.stderr.write("{} for {} on sm_{}\n".format(*job))
            yield (*job, made)


def _triton() -> Any:
    install = "pip install triton (Linux, x86-64). Running the shipped kernels does not need it."
    with needs_package("compiling the kernels", install, BackendError):
        import triton
    return triton


def _without_scratch(ptx: str, entry: str, parameters: int) -> str:
    """Return `ptx` without the two unused pointers that Triton appends, which a launch does not pass."""
    for place in (parameters, parameters + 1):
        name = f"{entry}_param_{place}"
        ptx, found = re.subn(rf",\s*\.param [^,)]*\b{name}\b(?=\s*[,)])", "", ptx)
        if found != 1 or name in ptx:
            raise RuntimeError(f"{entry}: parameter {place} of Triton's own is missing or used; see its PTX")
    return ptx


def _portable(ptx: str, sm: int) -> str:
    """Return `ptx` for `sm` and later GPUs, unless it uses instructions of `sm` alone."""
    return ptx if sm in _SPECIFIC else ptx.replace(f".target sm_{sm}a", f".target sm_{sm}")


def _assemble(ptx: str, sm: int, triton: Any) -> bytes:
    """Return the cubin, by the assembler of CUDA 12 if it has the sm, so that drivers of CUDA 12 load it."""
    tools = triton.knobs.nvidia
    assembler = tools.ptxas_blackwell if sm == 110 else tools.ptxas
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx, encoding="utf-8")
        target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]  # type: ignore[index]
        command = [assembler.path, "-O3", f"--gpu-name={target}", "kernel.ptx", "-o", "kernel.cubin"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        return cubin.read_bytes()


if __name__ == "__main__":
    sys.exit(main())
