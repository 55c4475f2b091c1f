"""What OpenVINO computes in on this processor, by the instructions that the processor itself reports.

OpenVINO computes in bf16 and rounds rows to int8 where the processor has instructions for it, and in fp32 elsewhere.
A test that needs such instructions asks here, and checks the fp32 results on all other processors.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# The names that Linux gives to AVX-512 VNNI and AVX-VNNI, and to bf16 of AVX-512 and of AVX2.
_INT8 = {"avx512_vnni", "avx_vnni"}
_BF16 = {"avx512_bf16", "avx_ne_convert"}


def instructions() -> set[str]:
    """Return the instruction sets of the first core."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    return set(next((line for line in lines if line.startswith(("flags", "Features"))), "").partition(":")[2].split())


def rounds_to_int8() -> bool | None:
    """Return whether OpenVINO rounds rows to int8 in front of quantised weights, or None if that is not known."""
    return _has(_INT8)


def computes_in_bf16() -> bool | None:
    """Return whether OpenVINO computes in bf16 unless fp32 is asked for, or None if that is not known."""
    return _has(_BF16)


def fastest_floats() -> set[str]:
    """Return the types that OpenVINO may compute floats in unless fp32 is asked for."""
    return {True: {"bf16"}, False: {"fp32"}, None: {"bf16", "fp32"}}[computes_in_bf16()]


def assert_error(error: float, *, rounded: bool | None, least: float, most: float, exact: float) -> None:
    """Assert that `error` is one of rounding, `least` to `most`, or at most `exact` where nothing is rounded.

    Where `rounded` is None, both are right.
    """
    lower, upper = {True: (least, most), False: (0.0, exact), None: (0.0, most)}[rounded]
    assert lower <= error <= upper, (error, rounded)


def _has(names: set[str]) -> bool | None:
    # oneDNN's switch takes instructions away, and only some of OpenVINO heeds it. On aarch64 other libraries compute.
    if os.environ.get("ONEDNN_MAX_CPU_ISA") or platform.machine() != "x86_64":
        return None
    return not names.isdisjoint(instructions())
