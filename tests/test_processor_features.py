"""What tests expect of OpenVINO on processors of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.stand_ins import processor_features
from support.stand_ins.processor_features import assert_error, computes_in_bf16, fastest_floats, rounds_to_int8

AVX2 = "fma avx avx2"
AVX512 = f"{AVX2} avx512f avx512bw avx512_vnni"


@pytest.mark.parametrize(
    ("machine", "line", "int8", "bf16", "floats"),
    [
        pytest.param("x86_64", f"flags\t: {AVX2}", False, False, {"fp32"}, id="AVX2 only"),
        pytest.param("x86_64", f"flags\t: {AVX2} avx_vnni", True, False, {"fp32"}, id="AVX-VNNI"),
        pytest.param("x86_64", f"flags\t: {AVX512}", True, False, {"fp32"}, id="AVX-512 VNNI"),
        pytest.param("x86_64", f"flags\t: {AVX512} avx512_bf16", True, True, {"bf16"}, id="bf16"),
        pytest.param("x86_64", f"flags\t: {AVX512} avx512_bf16 amx_bf16 amx_int8", True, True, {"bf16"}, id="AMX"),
        pytest.param("x86_64", f"flags\t: {AVX2} avx_vnni avx_ne_convert", True, True, {"bf16"}, id="AVX-NE-CONVERT"),
        pytest.param("aarch64", "Features\t: asimd asimddp i8mm bf16", None, None, {"bf16", "fp32"}, id="aarch64"),
    ],
)
def test_instructions_decide_what_is_rounded(
    machine: str,
    line: str,
    int8: bool | None,
    bf16: bool | None,
    floats: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\n{line}\n\nprocessor\t: 1\n{line}\n")
    monkeypatch.setattr(processor_features, "_CPUINFO", file)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert (rounds_to_int8(), computes_in_bf16(), fastest_floats()) == (int8, bf16, floats)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert (rounds_to_int8(), computes_in_bf16()) == (None, None)


@pytest.mark.parametrize(
    ("error", "rounded"), [(0.0, True), (0.05, True), (0.005, False), (0.05, None)], ids=lambda value: str(value)
)
def test_an_error_that_does_not_fit_the_processor_fails(error: float, rounded: bool | None) -> None:
    with pytest.raises(AssertionError):
        assert_error(error, rounded=rounded, least=1e-3, most=0.02, exact=1e-6)
