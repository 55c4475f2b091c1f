"""The benchmark of a decoder's rows: what it counts, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import decoder_rows
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.flops import decode_bytes

Bundles = Callable[..., Path]


@pytest.mark.parametrize(("backend", "sizes"), [("ort-cpu", {4}), ("openvino", {2, 4})])
def test_every_count_is_measured_in_every_round_beside_its_bytes(
    backend: str, sizes: set[int], bundle: Bundles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, file = bundle("gqa-112"), tmp_path / "rows.json"
    given = (str(root), "--rows", "8,70", "--repeat", "3", "--backend", backend, "--json", str(file))
    assert decoder_rows.main(given) == 0
    told = capsys.readouterr().out
    small, large = json.loads(file.read_text())
    manifest = read_bundle(root).manifest
    model = manifest.language_model
    for found, rows in ((small, 8), (large, 70)):
        assert found["rows"] == rows
        assert len(found["prefill_ms"]) == len(found["token_ms"]) == 3
        assert min(found["prefill_ms"] + found["token_ms"]) > 0
        values = 2 * rows * model.num_layers * model.num_kv_heads * model.head_dim
        # In bf16 where openvino and the processor compute in it.
        assert found["bytes"] in {decode_bytes(manifest, size * values) for size in sizes}
    assert f"{large['bytes'] / small['bytes']:.3f}" in told
    assert "x is over 8 rows" in told
