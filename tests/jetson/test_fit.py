"""What fits: needs and bounds by hand, for a real bundle and for presets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.memory import running_need
from sinkprune.contract.schedule import schedule
from sinkprune.jetson.boards import preset_manifest, read_presets
from sinkprune.jetson.fit import NEW_TOKENS, PROMPT_TOKENS, TargetMachine, fit, manifest_in_form
from sinkprune.runtime.backends.known import KNOWN
from sinkprune.runtime.families import load_family
from support.programs.doctor_runs import NANO, PICTURE, preset


def test_a_7b_by_hand() -> None:
    model = preset("llava-1.5-7b", usable=7_150_000_000)
    d, m, layers, vocabulary, text = 4096, 11008, 32, 32064, PROMPT_TOKENS
    n = 576 + text
    flops = layers * 2 * (4 * n * d * d + 2 * n * n * d + 3 * n * d * m)
    assert model.rows["none"].prefill_flops == flops
    assert model.rows["none"].tokens_per_layer == (576,) * 32
    assert model.rows["retain-64"].tokens_per_layer == (129,) * 3 + (110,) * 4 + (74,) * 9 + (42,) * 16
    fp16, int8, int4 = model.forms
    weights = layers * (4 * d * d + 3 * d * m) + vocabulary * d
    cache = 2 * layers * n * d * 2
    none = fp16.budgets["none"]
    assert none.kv_bytes == cache
    assert none.decode_bytes == pytest.approx(2 * weights + cache, rel=1e-3)
    assert none.bounds is not None
    assert none.bounds.prefill_flops_ms == pytest.approx(1e3 * flops / 17e12)
    assert none.bounds.prefill_weights_ms == pytest.approx(1e3 * 2 * weights / 102e9, rel=1e-3)
    assert none.bounds.token_ms == pytest.approx(1e3 * (2 * weights + cache) / 102e9, rel=1e-3)
    # The tower of the paper's table, and the projector on all its rows.
    assert none.bounds.encoder_flops_ms == pytest.approx(1e3 * (0.366e12 + 0.0242e12) / 17e12, rel=1e-2)
    assert not none.bounds.by_weights
    assert none.bounds.prefill_ms == none.bounds.prefill_flops_ms
    least = fp16.budgets["retain-32"].bounds
    assert least is not None
    assert least.by_weights
    assert least.prefill_ms == least.prefill_weights_ms
    halves = int4.budgets["none"].decode_bytes - cache, int8.budgets["none"].decode_bytes - cache
    assert halves[0] == pytest.approx((0.5 + 2 / 128) * weights, rel=1e-3)
    assert halves[1] == pytest.approx(weights, rel=2e-3)
    assert [form.budgets["none"].fits for form in model.forms] == [False, False, True]
    assert [(form.decoder_form, budget) for form, budget in model.fitting()] == [("int4", "none")]


def test_pruning_is_what_makes_a_long_prompt_fit() -> None:
    model = preset("llava-next-7b", usable=7_150_000_000)
    int4 = model.forms[-1]
    assert {budget: found.fits for budget, found in int4.budgets.items()} == {
        "none": False,
        "retain-320": True,
        "retain-160": True,
    }
    assert next(iter(model.fitting())) == (int4, "retain-320")


def test_a_need_is_the_contract_s(bundle: Callable[..., Path]) -> None:
    path = bundle("gqa-112", "fp16")
    manifest = read_bundle(path).manifest
    layout = next(iter(load_family(manifest).largest().values()))
    rows = schedule(manifest, "sinkpruner", "retain-64", [layout])
    tokens = PROMPT_TOKENS + NEW_TOKENS
    for backend, board in (("tensorrt", NANO), ("ort-cpu", None), ("ort-cpu+openvino", None), ("openvino", None)):
        here = fit("it", "bundle", manifest, TargetMachine(backend, 0, board), PICTURE).forms[0]
        expected = running_need(
            manifest, KNOWN[backend].memory, built=False, layouts=[layout], planned=rows, tokens=tokens
        )
        assert here.exported
        assert (here.budgets["retain-64"].bounds is None) == (board is None)
        assert here.budgets["retain-64"].memory == expected
        assert here.budgets["retain-64"].memory_bytes == expected.bytes


@pytest.mark.parametrize(
    ("precision", "weights", "backend", "forms"),
    [
        ("fp16", None, "tensorrt", [("fp16", "fp16", True), ("fp16", "int8", False), ("fp16", "int4", False)]),
        ("fp16", "int4", "tensorrt", [("fp16", "fp16", False), ("fp16", "int8", False), ("fp16", "int4", True)]),
        (
            "fp32",
            "int8",
            "tensorrt",
            [("fp32", "int8", True), ("fp16", "fp16", False), ("fp16", "int8", False), ("fp16", "int4", False)],
        ),
        ("fp32", None, "ort-cpu", [("fp32", "fp32", True), ("fp32", "int8", False), ("fp32", "int4", False)]),
        (
            "fp32",
            "uint4",
            "ort-cpu",
            [("fp32", "uint4", True), ("fp32", "fp32", False), ("fp32", "int8", False), ("fp32", "int4", False)],
        ),
    ],
)
def test_a_bundle_is_listed_in_its_form_and_in_the_others(
    precision: str, weights: str | None, backend: str, forms: list[tuple[str, str, bool]], bundle: Callable[..., Path]
) -> None:
    path = bundle("mha-336", precision, weights=weights)
    model = fit("it", "bundle", read_bundle(path).manifest, TargetMachine(backend, 0, None), PICTURE)
    assert [(form.precision, form.decoder_form, form.exported) for form in model.forms] == forms
    own = next(form for form in model.forms if form.exported)
    manifest = read_bundle(path).manifest
    assert own.weight_bytes == sum(map(manifest.weight_bytes, manifest.graphs))
    assert all(found.fits is None for form in model.forms for found in form.budgets.values())
    assert len(list(model.fitting())) == len(forms)


def test_what_is_needed_to_the_byte_fits() -> None:
    none = preset("llava-1.1b").forms[0].budgets["none"]
    assert none.fits is None
    for spare, fits in ((0, True), (-1, False)):
        model = preset("llava-1.1b", usable=none.memory_bytes + spare)
        assert model.forms[0].budgets["none"].fits is fits


def test_faster_boards_have_lower_bounds_in_their_ratio() -> None:
    slow = preset("qwen2.5-vl-3b").forms[0].budgets["none"].bounds
    fast = preset("qwen2.5-vl-3b", replace(NANO, fp16_tflops=34, gb_per_s=408)).forms[0].budgets["none"].bounds
    assert slow is not None and fast is not None
    assert slow.prefill_flops_ms == pytest.approx(2 * fast.prefill_flops_ms)
    assert slow.encoder_flops_ms == pytest.approx(2 * fast.encoder_flops_ms)
    assert slow.token_ms == pytest.approx(4 * fast.token_ms)
    assert slow.prefill_weights_ms == pytest.approx(4 * fast.prefill_weights_ms)


def test_the_longest_text_is_the_last_that_fits() -> None:
    model = preset("llava-1.5-7b", usable=7_150_000_000)
    manifest = manifest_in_form(
        preset_manifest("llava-1.5-7b", read_presets()["llava-1.5-7b"], "opset20"), "fp16", "int4"
    )
    layout = load_family(manifest).layout(Image.new("RGB", PICTURE))
    for budget in ("none", "retain-64"):
        rows = schedule(manifest, "sinkpruner", budget, [layout])
        found = model.forms[-1].budgets[budget]
        assert found.longest_text is not None
        needs = [
            running_need(manifest, None, built=False, layouts=[layout], planned=rows, tokens=tokens).bytes
            for tokens in (found.longest_text, found.longest_text + 1)
        ]
        assert needs[0] <= 7_150_000_000 < needs[1]
    # With enough memory the model's positions are the limit. Without memory for the weights, no text fits.
    roomy = preset("llava-1.5-7b", usable=1 << 40).forms[-1].budgets["none"]
    assert roomy.longest_text == 4096 - 576
    heavy = model.forms[0].budgets["none"]
    assert heavy.longest_text == 0
    assert preset("llava-1.5-7b").forms[0].budgets["none"].longest_text is None
