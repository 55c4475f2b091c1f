"""Programs that measure requests: second questions, rows of the decoder, deadlines, and growth over many."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

import decoder_rows
import flat
from deadlines import Asked, in_words, main, measure
from flat import Drift
from follow_ups import FrozenSelects
from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.flops import decode_bytes
from sinkprune.contract.progress import unreported
from support.programs.commands import BIN
from support.references.same_answers import kept_sets

FIRST, SECOND = "What is on the table?", "Is the cup full, and where is it?"


@pytest.mark.parametrize("backend", ["ort-cpu", "openvino"])
def test_frozen_selects_keep_what_they_kept_last(
    backend: str, bundle: Callable[..., Path], photo: Image.Image
) -> None:
    selects, options = FrozenSelects(), {"budget": "retain-64", "max_new_tokens": 4, "min_new_tokens": 4}
    path = bundle("gqa-112", "fp32", ("retain-64",))
    pipeline = Pipeline.load(path, backend=backend, compute="fp32", wrap=selects.wrap)
    second = pipeline.generate(photo, SECOND, **options)
    selects.frozen = True
    again = pipeline.generate(photo, SECOND, **options)
    assert again.token_ids == second.token_ids
    selects.frozen = False
    first = pipeline.generate(photo, FIRST, **options)
    selects.frozen = True
    found = pipeline.generate(photo, SECOND, **options)
    assert kept_sets(found) == kept_sets(first) != kept_sets(second)
    assert found.kv_bytes == second.kv_bytes


@pytest.mark.parametrize(("backend", "sizes"), [("ort-cpu", {4}), ("openvino", {2, 4})])
def test_every_count_is_measured_in_every_round_beside_its_bytes(
    backend: str, sizes: set[int], bundle: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
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


def test_requests_are_counted_by_the_clock_and_by_their_report() -> None:
    alone = iter([*[10.0] * 4, *[10.0, 13.0, 10.0, 10.0]])
    # In time; late and reported so; late and reported to be in time; in time and shorter than expected.
    hurried = iter(
        [
            Asked(9.0, "none", SimpleNamespace(met=True), 10.0),
            Asked(15.0, "none", SimpleNamespace(met=False), 10.0),
            Asked(15.0, "retain-64", SimpleNamespace(met=True), 15.0),
            Asked(5.0, "none", SimpleNamespace(met=True), None),
        ]
    )

    def ask(seed: int, budget: str, deadline_ms: float | None) -> Asked:
        assert (budget, deadline_ms) in (("retain-32", None), ("none", pytest.approx(12.0)))
        return Asked(next(alone), budget, None, None) if deadline_ms is None else next(hurried)

    (row,) = measure(ask, "retain-32", [1.2], 4, unreported)
    assert row["met"] == row["met_by_smallest"] == 0.75
    assert row["wrong"] == 1
    assert row["measured_over_expected"][0] == pytest.approx(1.0)
    assert row["ran"] == {"none": 3, "retain-64": 1}
    line = "| none | 12 | 75.0% | 75.0% | 1 | 1.00 (0.91 to 1.45) | 3 none, 1 retain-64 |\n"
    assert in_words("none", row) == line


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["answers", "chunks"])
def test_bundles_of_both_kinds(
    kind: str,
    bundle: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = bundle("gqa-112") if kind == "answers" else bundle("pi0-bare")
    short = ["--requests", "2", "--factors", "5", "--load", "1,0.1,0.1"]
    assert main([str(path), *short, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_bytes())
    assert list(found) == ["none", "1 x 0.1 s on, 0.1 s off"]
    for (row,) in found.values():
        assert (row["requests"], row["wrong"], sum(row["ran"].values())) == (2, 0, 2)
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_drift_is_of_the_ends() -> None:
    assert flat.drift([5.0] * 90) == Drift(5.0, 0.0)
    grown = flat.drift([float(number) for number in range(900)])
    assert grown.first == pytest.approx(149.5)
    assert grown.added == pytest.approx(900)
    spikes = [1.0] * 90
    spikes[3] = spikes[80] = 100.0
    assert flat.drift(spikes) == Drift(1.0, 0.0)
    for memory, seconds, expected in (
        (Drift(1e8, 4e6), Drift(1, 0.1), True),
        (Drift(1e8, 5e6), Drift(1, 0.0), False),
        (Drift(1e9, 9e6), Drift(1, -0.5), True),
        (Drift(1e9, 11e6), Drift(1, 0.0), False),
        (Drift(1e8, -1e7), Drift(1, 0.11), False),
    ):
        assert flat.is_flat(memory, seconds) == expected


@pytest.mark.slow
def test_many_requests_are_flat(tmp_path: Path) -> None:
    """Alone in a process. After 100 requests memory still grows by some MB, and after 300 no more."""
    root = Path(flat.__file__).parent.parent
    subprocess.run([BIN / "sinkprune-export", root / "demo" / "pocket", "-o", tmp_path / "pocket"], check=True)
    words = [sys.executable, flat.__file__, tmp_path / "pocket", "--requests", "1500"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
