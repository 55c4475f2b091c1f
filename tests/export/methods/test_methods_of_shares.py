"""If images differ in N, every method keeps what its reference keeps, for any N, frames and DeepStack."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest

from sinkprune.contract.budgets import FAMILIES, OPTIONS, parse_budget
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.flops import layer_flops
from sinkprune.contract.schedule import PictureSchedule
from sinkprune.export.dialects import Dialect, opset20, opset24
from sinkprune.export.methods import METHODS as ALL_METHODS
from sinkprune.export.methods import load_method
from sinkprune.export.planning import plan_graphs
from sinkprune.export.pruning.plan import MAX_ROUNDS, PlanFacts, PlanGraphs, UnreachableBudget, VariableTokens
from sinkprune.export.weights import PRECISIONS
from support.models import graphs
from support.programs.slow_cases import each_once, every
from support.references import reference
from support.references.kept_tokens import SANITIZING, assert_keeps
from support.references.reference_methods import READ_THE_QUESTION

Array = np.ndarray[Any, Any]
D = 16
SIZES = (1, 2, 3, 4, 5, 8, 19, 101, 228)
BUDGETS = FAMILIES["qwen3-vl"].budgets
CHOOSING = [method for method in SANITIZING if not method.startswith("downsample")]
"""The methods whose sanitizers serve pictures of any size, and have a reference."""
READING = (*READ_THE_QUESTION, "sinkpruner-text")
# `downsample-ttft` has the budget's time, not its mean.
EQUAL_MEAN = [method for method in ALL_METHODS if method != "downsample-ttft"]


def tower(tokens: int) -> int:
    """The FLOPs of a tower in which a token costs as much as in two layers of the decoder."""
    return 2 * layer_flops(graphs.language_model(), tokens)


def facts(layers: int = 28, most: int = 480, precision: str = "fp32", **more: Any) -> PlanFacts:
    model = replace(graphs.language_model(), num_layers=layers, rope_sections=(1, 1, 2))
    tokens = VariableTokens(most, 784, most * more.get("groups", 1), tower)
    return PlanFacts(model, tokens, D, PRECISIONS[precision], opset24, **more)


def features(n: int, groups: int = 1, seed: int = 0) -> dict[str, Array]:
    draw = np.random.default_rng(seed)
    tokens = draw.standard_normal((groups, n, D))
    # Some alike, some zero, some large
    tokens[..., n // 2 : n // 2 + n // 8, :] = tokens[..., : n // 8, :]
    tokens[..., n - n // 9 :, :] = 0
    norms, salience = draw.random((2, groups, n))
    width = graphs.language_model().hidden_size
    inputs = {
        "tokens": tokens,
        "norms": norms,
        "salience": (salience * 16).round() / 16,
        "embeddings": draw.standard_normal((groups, n, width)),
        "question": draw.standard_normal((5, width)),
    }
    return {name: array.astype(np.float32) for name, array in inputs.items()}


def sanitizer(plan: PlanGraphs, library: str = "ort-cpu") -> graphs.Run:
    assert plan.sanitizer is not None
    return graphs.loaded(plan.sanitizer, library)


@pytest.mark.parametrize(
    ("method", "library"), [*((method, "ort-cpu") for method in CHOOSING), *((one, "openvino") for one in READING)]
)
@pytest.mark.parametrize(("budget", "dialect"), [("prune-66.7", opset24), ("prune-88.9", opset20)])
def test_one_sanitizer_keeps_the_references_tokens_at_any_n(
    method: str, library: str, budget: str, dialect: Dialect
) -> None:
    plan = load_method(method)(replace(facts(most=228), dialect=dialect), BUDGETS[budget])
    run = sanitizer(plan, library)
    for n in SIZES:
        if plan.kept.resolve(n).kept:
            assert_keeps(run, method, plan.kept, features(n, seed=n), any_size=True)


@pytest.mark.parametrize("library", ["ort-cpu", "openvino"])
@pytest.mark.parametrize("method", ["uniform", "random", "fastervlm", "dart"])
def test_shares_of_the_largest_images_are_exact_where_shapes_have_32_bits(method: str, library: str) -> None:
    n = 10_000
    plan = load_method(method)(facts(most=n), BUDGETS["prune-66.7"])
    kept = sanitizer(plan, library)(**features(n))["kept_index"]
    assert kept.shape == (1, plan.kept.resolve(n).kept)


def test_the_shares_of_the_longest_clip_fit_into_32_bits() -> None:
    for build, budget in product(ALL_METHODS.values(), BUDGETS.values()):
        with suppress(UnreachableBudget):
            kept = build(facts(), budget).kept
            assert all(share.numerator * 200_000 < 2**31 for share in (kept.reserve, kept.diverse, *kept.stages))


@pytest.mark.parametrize("method", [*CHOOSING, "random"])
def test_a_clips_frames_are_one_group_or_apart(method: str) -> None:
    inputs = features(6, 4)
    inputs["deepstack"] = np.random.default_rng(7).standard_normal((4, 6, 2 * D)).astype(np.float32)
    whole = {name: array.reshape(1, 24, *array.shape[2:]) for name, array in inputs.items() if name != "question"}
    whole["question"] = inputs["question"]
    clip = facts(most=6, groups=4, joined=True, deepstack=2)
    budget = parse_budget("qwen3-vl", "prune-77.8")
    alone, joined = (
        sanitizer(load_method(method)(facts(most=24, deepstack=2) if own is whole else clip, budget))(**own)
        for own in (whole, inputs)
    )
    assert joined["kept_tokens"].shape[0] == 1
    for name, array in alone.items():
        np.testing.assert_array_equal(joined[name], array)

    frames = sanitizer(load_method(method)(clip, replace(budget, frames="apart")))(**inputs)
    each = sanitizer(load_method(method)(facts(most=6, deepstack=2), budget))
    for group in range(4):
        own = {name: array if name == "question" else array[group : group + 1] for name, array in inputs.items()}
        for name, array in each(**own).items():
            np.testing.assert_array_equal(frames[name][group], array[0])


@pytest.mark.parametrize("method", CHOOSING)
def test_deepstack_goes_with_its_tokens(method: str) -> None:
    """Which tokens are kept is chosen by the tokens alone; what goes with them is gathered, and merged, alike."""
    sets, n = 3, 101
    beside = np.random.default_rng(5).standard_normal((1, n, sets * D)).astype(np.float32)
    plan = load_method(method)(facts(most=228, deepstack=sets), BUDGETS["prune-77.8"])
    assert_keeps(sanitizer(plan), method, plan.kept, {**features(n), "deepstack": beside}, any_size=True)


def mean_of(plan: PlanGraphs, n: int, layers: int) -> Fraction:
    if plan.sanitizer is None and not plan.select_after:
        # The picture is made smaller, to this share.
        return Fraction(plan.kept.reserve.of(n))
    counts = plan.kept.resolve(n)
    return PictureSchedule.of(counts, 1, tuple(plan.select_after)).mean(layers)


@pytest.mark.parametrize(("method", "layers"), every(4, product(EQUAL_MEAN, [28, 36])))
def test_means_are_equal_to_two_tokens(method: str, layers: int) -> None:
    for name, budget in BUDGETS.items():
        own, plan = (load_method(each)(facts(layers), budget) for each in ("sinkpruner", method))
        for n in (30, 64, 228, 480, 1000, 3840):
            assert abs(mean_of(plan, n, layers) - mean_of(own, n, layers)) <= 2, (name, n)


@pytest.mark.parametrize(
    "method", ["divprune", "dart", "prunesid", "fastervlm", "visionzip", "vscan", "random", "fastv"]
)
def test_more_than_topk_gives_is_rejected_with_the_size_that_fits(method: str) -> None:
    with pytest.raises(BudgetError, match=r"keeps \d+ in one step; TensorRT's TopK gives at most 3840.*--max-pixels"):
        load_method(method)(facts(most=20_000, precision="fp16"), BUDGETS["prune-66.7"])


@pytest.mark.parametrize("method", ["scope", *READ_THE_QUESTION])
def test_more_rounds_than_a_graph_has_are_rejected_with_the_size_that_fits(method: str) -> None:
    most, budget = 6000, BUDGETS["prune-77.8"]
    wanted = load_method("divprune")(facts(most=most), budget).kept.resolve(most).kept
    fit = most * MAX_ROUNDS // wanted
    assert wanted > MAX_ROUNDS
    with pytest.raises(BudgetError, match=rf"one by one, at most {MAX_ROUNDS}\. Allow up to {fit} tokens only"):
        load_method(method)(facts(most=most), budget)
    load_method(method)(facts(most=fit), budget)


@pytest.mark.parametrize(
    ("option", "precision"), each_once(["raster", "keep-outliers", "drop-sink", "no-diversity"], ["fp32", "fp16"])
)
def test_sinkpruners_options_keep_the_references_tokens_at_any_n(option: str, precision: str) -> None:
    budget = OPTIONS[option](BUDGETS["prune-77.8"])
    run = sanitizer(load_method("sinkpruner")(facts(4, precision=precision), budget))
    for n in (1, 2, 19, 20, 101, 480):
        given = {name: features(n)[name] for name in ("tokens", "norms", "salience")}
        given["tokens"] = given["tokens"].astype(PRECISIONS[precision].numpy)
        out = run(**given)
        kept, index = reference.sanitize_at(budget, *(array[0] for array in given.values()))
        assert out["kept_index"].tolist() == [index] and len(index) == budget.resolve(n).kept
        np.testing.assert_allclose(out["kept_tokens"][0], kept, atol=1e-5 if precision == "fp32" else 1e-3)


def test_what_is_ranked_of_a_clip_is_of_all_its_frames_unless_they_stand_apart() -> None:
    clip = facts(4, 1000, "fp16", groups=11, joined=True)
    with pytest.raises(BudgetError, match=r"up to 11000 .* keeps 4400 in one step.*fewer --max-frames.*per-frame"):
        load_method("sinkpruner")(clip, parse_budget("qwen2.5-vl", "prune-80"))
    assert load_method("sinkpruner")(clip, parse_budget("qwen2.5-vl", "prune-80+per-frame")).sanitizer is not None


def test_compact_positions_are_rejected_where_positions_have_axes() -> None:
    with pytest.raises(BudgetError, match=r"'compact'.*several axes"):
        plan_graphs(facts(), ["fastv"], {"c": parse_budget("qwen2.5-vl", "prune-77.8+compact")}, print)
