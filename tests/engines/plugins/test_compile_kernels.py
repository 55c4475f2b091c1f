"""The shipped binaries are compiled from these sources, and fit the launches."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import zipfile
from importlib.resources import files
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from sinkprune.contract.errors import BackendError
from sinkprune.engines.plugins import compile, launches
from sinkprune.engines.plugins.compile import DTYPES, PTX_VERSIONS, Compiled
from sinkprune.engines.plugins.launches import binary

ARCHIVE = files("sinkprune.engines.plugins") / launches.ARCHIVE
INDEX = json.loads(zipfile.ZipFile(io.BytesIO(ARCHIVE.read_bytes())).read(launches.INDEX))
KERNELS = [kernel for kernels in launches.KERNELS.values() for kernel in kernels]
EVERY = list(product(KERNELS, DTYPES, PTX_VERSIONS))


def ptx(kernel: str, dtype: str, sm: int) -> bytes:
    """The shipped PTX of a kernel for exactly this type and GPU."""
    return zipfile.ZipFile(io.BytesIO(ARCHIVE.read_bytes())).read(f"{kernel}.{dtype}.sm_{sm}.ptx")


def test_every_kernel_is_shipped_as_these_sources_have_it() -> None:
    assert INDEX["source_sha256"] == compile.source_sha256(), "run: python -m sinkprune.engines.plugins.compile"
    assert sorted(KERNELS) == sorted(compile.configurations("float16"))
    assert {(entry["kernel"], entry["dtype"], entry["sm"]) for entry in INDEX["entries"]} == set(EVERY)
    assert len(ARCHIVE.read_bytes()) < 5_000_000
    # Equal archives whenever they are written
    made = ("top_rho", "float16", 100, Compiled("top_rho", 128, 512, "ptx", b"cubin"))
    archives = [compile.archive(iter([made]), triton) for triton in ("1", "1", "2")]
    assert archives[0] == archives[1] != archives[2]


@pytest.mark.parametrize(("kernel", "dtype", "sm"), [("top_rho", "float16", 87), ("diversity_phase", "float32", 90)])
def test_a_kernel_compiled_again_is_the_one_that_is_shipped(kernel: str, dtype: str, sm: int) -> None:
    triton = pytest.importorskip("triton")
    made = compile.compile_kernel(kernel, dtype, sm)
    shipped = binary(kernel, dtype, sm)
    assert (made.entry, made.threads) == (shipped.entry, shipped.threads)
    if triton.__version__ == INDEX["triton"]:
        assert made.shared_bytes == shipped.shared_bytes
        assert made.ptx.encode() == ptx(kernel, dtype, sm)
        assert made.cubin == shipped.image


def test_parameters_of_kernels_are_those_of_launches() -> None:
    names = ("norms", "tokens", "sink", "outlier", "candidate", "reserved", "chosen", "workspace")
    addresses = {name: 16 * place for place, name in enumerate(names, 1)}
    sizes = {"G": 2, "N": 50, "D": 64, "R": 3, "count": 20, "rounds": 1}
    top = launches.top_rho_launches(addresses, sizes, "float16")
    phases = launches.diversity_launches(addresses, sizes, "float16")
    given = {launch.kernel: launch.arguments for launch in (*top, *phases)}
    for kernel, dtype, sm in EVERY:
        taken = re.findall(r"\.param \.(u\d+)", ptx(kernel, dtype, sm).decode())
        arguments = given[kernel.removesuffix("_unaligned")]
        assert taken == ["u64" if isinstance(argument, np.uint64) else "u32" for argument in arguments]


def test_cubins_and_ptx_are_for_their_sm_and_load_without_asking() -> None:
    for kernel, dtype, sm in EVERY:
        cubin, text = binary(kernel, dtype, sm), ptx(kernel, dtype, sm).decode()
        # An ELF file of machine 190, EM_CUDA; its flags name the sm, in the second byte since CUDA 13.
        assert cubin.image[:4] == b"\x7fELF"
        assert int.from_bytes(cubin.image[18:20], "little") == 190
        assert sm in (cubin.image[48], cubin.image[49])
        major, minor = divmod(PTX_VERSIONS[sm], 10)
        assert re.search(rf"^\.version {major}\.{minor}\n\.target sm_{sm}a?$", text, re.MULTILINE)
        assert re.search(rf"\.reqntid {cubin.threads}\b", text)
        assert cubin.shared_bytes <= 48 << 10


def test_a_younger_gpu_gets_the_ptx_of_the_nearest_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # The PTX for sm_100 runs on no other GPU.
    for sm, nearest in ((88, 87), (121, 120), (103, 90)):
        assert binary("top_rho", "float16", sm).image == ptx("top_rho", "float16", nearest)
    with pytest.raises(BackendError, match=r"shipped for sm_80, .* sm_120, and this GPU is sm_75, which is older"):
        binary("top_rho", "float16", 75)
    monkeypatch.setattr(zipfile, "lzma", None)
    with pytest.raises(BackendError, match=r"cannot be unpacked: .*lzma module\. Use a Python that was built with"):
        binary("top_rho", "float16", 87)


def test_a_board_needs_no_triton(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "from sinkprune.engines.plugins import compile, launches\n"
        "print(launches.binary('top_rho', 'float16', 87).threads)\n"
        "sys.exit(compile.main(['-o', 'kernels.zip']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout.strip().isdigit()
    assert "needs the package 'triton', which is not installed" in done.stderr
    assert list(tmp_path.iterdir()) == []
