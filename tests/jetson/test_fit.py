"""What fits, by hand, for a real bundle and for presets, and the recommendation: the best row that findings allow."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.engines_manifest import Target
from sinkprune.contract.manifest import BESIDE_GRAPHS
from sinkprune.contract.memory import running_need
from sinkprune.contract.schedule import schedule
from sinkprune.engines.targets import BuildMemory, disk_bytes, needed_bytes
from sinkprune.jetson.boards import preset_manifest, read_presets
from sinkprune.jetson.fit import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    FormFit,
    ModelFit,
    TargetMachine,
    best_form,
    build_fit,
    fit,
    manifest_in_form,
    recommend,
)
from sinkprune.runtime.backends.known import KNOWN
from sinkprune.runtime.families import load_family
from support.programs.commands import succeed
from support.programs.doctor_runs import NANO, PICTURE, doctor, preset, set_python, told
from support.stand_ins.board_trees import changed, orin_nano_jetpack_6_2


def test_a_7b_by_hand() -> None:
    model = preset("llava-1.5-7b", usable=7_150_000_000)
    d, m, layers, vocabulary, text = 4096, 11008, 32, 32064, PROMPT_TOKENS
    n = 576 + text
    flops = layers * 2 * (4 * n * d * d + 2 * n * n * d + 3 * n * d * m)
    assert model.rows["none"].prefill_flops == flops
    assert model.rows["none"].tokens_per_layer == (576,) * 32
    assert model.rows["retain-64"].tokens_per_layer == (129,) * 3 + (61,) * 29
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
    assert (none.bounds.by_weights, none.bounds.prefill_ms) == (False, none.bounds.prefill_flops_ms)
    least = fp16.budgets["retain-32"].bounds
    assert least is not None
    assert (least.by_weights, least.prefill_ms) == (True, least.prefill_weights_ms)
    halves = int4.budgets["none"].decode_bytes - cache, int8.budgets["none"].decode_bytes - cache
    assert halves[0] == pytest.approx((0.5 + 2 / 128) * weights, rel=1e-3)
    assert halves[1] == pytest.approx(weights, rel=2e-3)
    assert [form.budgets["none"].fits for form in model.forms] == [False, False, True]
    assert [(form.decoder_form, budget) for form, budget in model.fitting()] == [("int4", "none")]


def test_pruning_is_what_makes_a_long_prompt_fit() -> None:
    model = preset("llava-next-7b", usable=7_150_000_000)
    int4 = model.forms[-1]
    fitting = {budget: found.fits for budget, found in int4.budgets.items()}
    assert fitting == {"none": False, "retain-320": True, "retain-160": True}
    assert next(iter(model.fitting())) == (int4, "retain-320")


def test_a_need_is_the_contract_s(bundle: Callable[..., Path]) -> None:
    manifest = read_bundle(bundle("gqa-112", "fp16")).manifest
    layout = next(iter(load_family(manifest).largest().values()))
    rows = schedule(manifest, "sinkpruner", "retain-64", [layout])
    sizes = {"built": False, "layouts": [layout], "planned": rows, "tokens": PROMPT_TOKENS + NEW_TOKENS}
    for backend, board in (("tensorrt", NANO), ("ort-cpu", None), ("ort-cpu+openvino", None), ("openvino", None)):
        here = fit("it", "bundle", manifest, TargetMachine(backend, 0, board), PICTURE).forms[0]
        found, expected = here.budgets["retain-64"], running_need(manifest, KNOWN[backend].memory, **sizes)
        assert here.exported
        assert (found.bounds is None) == (board is None)
        assert (found.memory, found.memory_bytes) == (expected, expected.bytes)


@pytest.mark.parametrize(
    ("precision", "weights", "backend", "forms"),
    [
        ("fp16", None, "tensorrt", "fp16/fp16* fp16/int8 fp16/int4"),
        ("fp16", "int4", "tensorrt", "fp16/fp16 fp16/int8 fp16/int4*"),
        ("fp32", "int8", "tensorrt", "fp32/int8* fp16/fp16 fp16/int8 fp16/int4"),
        ("fp32", None, "ort-cpu", "fp32/fp32* fp32/int8 fp32/int4"),
        ("fp32", "uint4", "ort-cpu", "fp32/uint4* fp32/fp32 fp32/int8 fp32/int4"),
    ],
)
def test_a_bundle_is_listed_in_its_form_and_in_the_others(
    precision: str, weights: str | None, backend: str, forms: str, bundle: Callable[..., Path]
) -> None:
    path = bundle("mha-336", precision, weights=weights)
    model = fit("it", "bundle", read_bundle(path).manifest, TargetMachine(backend, 0, None), PICTURE)
    listed = [f"{form.precision}/{form.decoder_form}{'*' if form.exported else ''}" for form in model.forms]
    assert listed == forms.split()
    own = next(form for form in model.forms if form.exported)
    manifest = read_bundle(path).manifest
    assert own.weight_bytes == sum(map(manifest.weight_bytes, manifest.graphs))
    assert all(found.fits is None for form in model.forms for found in form.budgets.values())
    assert len(list(model.fitting())) == len(listed)


@pytest.mark.parametrize(("name", "text"), [("pi0", 20), ("pi0.5", 160)])
def test_a_chunk_by_hand(name: str, text: int) -> None:
    model = preset(name, usable=7_150_000_000)
    int8 = model.forms[1]
    expert, decoder = (18 * (2 * d * 2048 + 2 * d * 256 + 3 * d * m) for d, m in ((1024, 4096), (2048, 16384)))
    # Of the last layer keys and values only.
    decoder -= 2 * 2048 * 2048 + 3 * 2048 * 16384
    tower = 27 * (4 * 1152**2 + 2 * 1152 * 4304)
    for budget, rows in model.rows.items():
        found = int8.budgets[budget]
        cache = sum(2 * 2 * 256 * (count + text) for count in rows.tokens_per_layer)
        assert (found.kv_bytes, found.longest_text, found.bounds) == (cache, None, None)
        assert [*found.chunks] == ["10", "5", "2"]
        for steps, chunk in found.chunks.items():
            read = tower + decoder + int(steps) * (expert + cache)
            assert chunk.bytes == pytest.approx(read, rel=0.02)
            assert chunk.bytes_ms == pytest.approx(chunk.bytes / 102e6)
            assert chunk.flops == rows.encoder_flops + rows.prefill_flops + int(steps) * (rows.step_flops or 0)
            assert chunk.flops_ms == pytest.approx(chunk.flops / 17e9)
    assert model.visual_tokens == 3 * 256 and model.prompt_tokens == text and model.new_tokens == 0
    assert [form.budgets["none"].fits for form in model.forms] == [False, True, True]
    # Without a datasheet there is no time.
    bare = preset(name, None).forms[1].budgets["none"].chunks["10"]
    assert (bare.flops, bare.flops_ms, bare.bytes_ms) == (int8.budgets["none"].chunks["10"].flops, None, None)


def test_the_longest_text_is_the_last_that_fits() -> None:
    usable = 7_150_000_000
    model = preset("llava-1.5-7b", usable=usable)
    bare = preset_manifest("llava-1.5-7b", read_presets()["llava-1.5-7b"], "opset20")
    manifest = manifest_in_form(bare, "fp16", "int4")
    layout = load_family(manifest).layout(Image.new("RGB", PICTURE))
    for budget in ("none", "retain-64"):
        rows = schedule(manifest, "sinkpruner", budget, [layout])
        longest = model.forms[-1].budgets[budget].longest_text
        assert longest is not None
        for tokens, fits in ((longest, True), (longest + 1, False)):
            need = running_need(manifest, None, built=False, layouts=[layout], planned=rows, tokens=tokens)
            assert (need.bytes <= usable) == fits
    # With enough memory the model's positions are the limit. Without memory for the weights, no text fits.
    roomy = preset("llava-1.5-7b", usable=1 << 40).forms[-1].budgets["none"]
    assert roomy.longest_text == 4096 - 576
    heavy = model.forms[0].budgets["none"]
    assert heavy.longest_text == 0
    assert preset("llava-1.5-7b").forms[0].budgets["none"].longest_text is None


def test_the_largest_graph_counts_in_memory_and_all_on_disk(bundle: Callable[..., Path]) -> None:
    source = read_bundle(bundle("mha-336", "fp16"))
    manifest = source.manifest
    weights = {graph: manifest.weight_bytes(graph) for graph in manifest.graphs}
    largest = max(weights, key=weights.__getitem__)
    beside = sum(manifest.files[name].size for name in BESIDE_GRAPHS)
    found, memory = build_fit(manifest, "tensorrt", 0, None), BuildMemory("memory", 0, copies=3.2, activations=False)
    assert found.memory_bytes == needed_bytes(source, largest, {}, memory)
    # An engine without weights is small.
    code = sum(16 << 20 if own else 5 << 20 for own in weights.values())
    assert found.disk_bytes == beside + sum(weights.values()) + code
    assert beside < found.moving_disk_bytes == found.disk_bytes - sum(list(weights.values())[:-1])
    assert (found.fits, found.needs_move) == (None, False)


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_engines_of_a_cpu_take_at_most_the_computed_disk(
    target: Target, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    source = bundle("gqa-112")
    manifest = read_bundle(source).manifest
    succeed("sinkprune-build", source, "-o", tmp_path / "engines", "--target", target)
    taken = sum(file.stat().st_size for file in (tmp_path / "engines").rglob("*") if file.is_file())
    weights = sum(map(manifest.weight_bytes, manifest.graphs))
    most = disk_bytes(manifest, manifest.graphs, target, move=False)
    assert taken <= most <= taken + 2 * weights + len(manifest.graphs) * (2 << 20)


def test_a_byte_too_little_does_not_fit(bundle: Callable[..., Path]) -> None:
    manifest = read_bundle(bundle("mha-336", "fp16")).manifest
    need = build_fit(manifest, "tensorrt", 0, None)
    memory, disk, moving = need.memory_bytes, need.disk_bytes, need.moving_disk_bytes
    for usable, free, fits, needs_move in (
        (memory, None, True, False),
        (memory - 1, disk, False, False),
        (memory, disk, True, False),
        (0, disk - 1, True, True),
        (0, moving, True, True),
        (memory, moving - 1, False, False),
    ):
        found = build_fit(manifest, "tensorrt", usable, free)
        assert (found.fits, found.needs_move) == (fits, needs_move), (usable, free)


def chosen(model: ModelFit) -> tuple[str, str] | None:
    """The form and the budget of the best choice."""
    best = best_form(model)
    return (best[0].decoder_form, best[1]) if best else None


def fitting(form: FormFit, fits: bool) -> FormFit:
    """The form, which fits at retain-192 or only at retain-32."""
    budgets = {name: replace(one, fits=fits or name == "retain-32") for name, one in form.budgets.items()}
    return replace(form, budgets=budgets)


def test_the_best_choice_answers_soonest_at_the_largest_budget() -> None:
    model = preset("llava-1.1b", usable=8 << 30)
    # Without a datasheet, the fewest bytes win.
    assert chosen(model) == chosen(preset("llava-1.1b", None)) == ("int4", "retain-192")
    # Where one form alone fits at the largest budget, a quicker one at a smaller budget is no choice.
    forms = tuple(fitting(form, form.decoder_form == "fp16") for form in model.forms)
    assert chosen(replace(model, forms=forms)) == ("fp16", "retain-192")
    assert chosen(preset("llava-1.5-13b", usable=7_150_000_000)) is None
    # What cannot be built is no choice. A bundle runs on a processor as it is.
    *others, int4 = model.forms
    assert int4.build is not None and int4.build.fits
    too_large = replace(int4, build=replace(int4.build, fits=False))
    assert chosen(replace(model, forms=(*others, too_large))) == ("int8", "retain-192")
    assert chosen(replace(model, forms=(too_large,), backend="ort-cpu")) == ("int4", "retain-192")


def test_a_budget_with_options_may_be_the_largest_of_a_folder_that_runs_as_it_is() -> None:
    model, name = preset("llava-1.1b"), "retain-192+raster"
    rows = {**model.rows, name: model.rows["retain-192"]}
    del rows["retain-192"]
    forms = tuple(
        replace(one, budgets={**one.budgets, name: one.budgets["retain-192"]}, exported=one is model.forms[0])
        for one in model.forms
    )
    folder = replace(model, kind="bundle", rows=rows, forms=forms)
    found = recommend(folder, as_it_is=True)
    assert found is not None and (found.as_it_is, found.budget) == (True, name)
    # An export makes none without being asked.
    found = recommend(folder, as_it_is=False)
    assert found is not None and (found.as_it_is, found.budget, found.weights) == (False, "retain-128", "int4")


def test_the_command_that_a_stop_forbids_is_not_printed(tmp_path: Path) -> None:
    """The page has what to do first, and the recommendation for afterwards."""
    root = orin_nano_jetpack_6_2(tmp_path)
    report = told("--root", root, "llava-1.1b")
    first = "make the environment again: python3.10 -m venv --system-site-packages .venv"
    assert (report["next"], report["first"]) == ([], [first])
    assert report["recommendations"][0]["weights"] == "int4"
    page = doctor("--root", root, "llava-1.1b").stdout
    assert f"First:\n  {first[:26]}" in page
    assert not any(words in page for words in ("Next:", "sinkprune-export", "sinkprune-build"))


def test_a_bundle_of_another_dialect_or_too_large_is_exported_again(
    monkeypatch: pytest.MonkeyPatch, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    """The printed command fixes the finding about the bundle."""
    set_python(monkeypatch, "3.10.12")
    path = bundle("mha-336", "fp16")
    report = told("--root", orin_nano_jetpack_6_2(tmp_path), path)
    assert [finding["model"] for finding in report["findings"] if finding["stops"]] == [str(path)]
    # A bundle has its checkpoint's name, not its path.
    given = r"PATH/TO/[^/\s]+"
    again = rf"sinkprune-export {given} -o \S+-int4 --precision fp16 --weights int4 --dialect opset20$"
    assert report["first"] == [] and re.match(again, *report["next"])
    assert not report["recommendations"][0]["as_it_is"]

    path = bundle("mha-336", "fp16", dialect="opset20")
    forms = told("--root", tmp_path, path)["models"][0]["forms"]
    fp16, int8 = (form["budgets"]["retain-32"]["memory_bytes"] for form in forms[:2])
    # Between int8 and fp16, in whole KiB.
    free = int8 // 1024 + 1
    assert int8 < free * 1024 < fp16
    memory = {"proc/meminfo": f"MemTotal: 8000000 kB\nMemAvailable: {free} kB\n"}
    report = told("--root", changed(tmp_path, memory), path)
    assert any("as it is exported" in finding["found"] for finding in report["findings"])
    assert re.match(again, report["next"][0])
