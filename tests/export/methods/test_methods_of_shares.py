"""If images differ in N, every method keeps what its reference keeps, for any N, frames and DeepStack."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from sinkprune.contract.budgets import FAMILIES, Counts, parse_budget
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.flops import layer_flops
from sinkprune.contract.schedule import PictureSchedule
from sinkprune.export.dialects import opset24
from sinkprune.export.methods import METHODS as ALL_METHODS
from sinkprune.export.methods import load_method
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs, UnreachableBudget, VariableTokens
from sinkprune.export.weights import PRECISIONS
from support.models import graphs
from support.models.chosen_heads import heads_by_layer
from support.programs.slow_cases import every
from support.references.reference_methods import BEFORE_LLM, Kept, visionzip

Array = np.ndarray[Any, Any]
D = 16
SIZES = (1, 2, 3, 4, 5, 8, 19, 101, 480)
BUDGETS = FAMILIES["qwen3-vl"].budgets
# `downsample-ttft` has the budget's time, not its mean.
EQUAL_MEAN = [method for method in ALL_METHODS if method != "downsample-ttft"]


def tower(tokens: int) -> int:
    """The FLOPs of a tower in which a token costs as much as in two layers of the decoder."""
    return 2 * layer_flops(graphs.language_model(), tokens)


def facts(layers: int = 28, most: int = 480, precision: str = "fp32", **more: Any) -> PlanFacts:
    model = replace(graphs.language_model(), num_layers=layers, rope_sections=(1, 1, 2))
    more.setdefault("heads", heads_by_layer(layers, model.num_heads))
    tokens = VariableTokens(most, 784, most * more.get("groups", 1), tower)
    return PlanFacts(model, tokens, D, PRECISIONS[precision], opset24, **more)


def features(n: int, *shape: int, seed: int = 0) -> dict[str, Array]:
    draw = np.random.default_rng(seed)
    tokens = draw.standard_normal((*shape, n, D)).astype(np.float32)
    # Some alike, some zero, some large
    tokens[..., n // 2 : n // 2 + n // 8, :] = tokens[..., : n // 8, :]
    tokens[..., n - n // 9 :, :] = 0
    norms, salience = draw.random((2, *shape, n)).astype(np.float32)
    return {"tokens": tokens, "norms": norms, "salience": (salience * 16).round() / 16}


def expected(method: str, counts: Counts, tokens: Array, norms: Array, salience: Array) -> Kept:
    """What the reference keeps, if the plan's counts are `counts`."""
    build: Callable[..., Kept] = BEFORE_LLM[method]
    if method.startswith("visionzip"):
        build = partial(visionzip, filtered=method != "visionzip", contextual=counts.diverse)
    return build(tokens, norms, salience, counts.reserve + counts.diverse)


def sanitizer(plan: PlanGraphs) -> graphs.Run:
    assert plan.sanitizer is not None
    return graphs.loaded(plan.sanitizer)


@pytest.mark.parametrize("budget", ["prune-66.7", "prune-88.9"])
@pytest.mark.parametrize("method", [name for name in BEFORE_LLM if not name.startswith("sinkpruner")])
def test_one_sanitizer_keeps_the_references_tokens_at_any_n(method: str, budget: str) -> None:
    plan = load_method(method)(facts(), BUDGETS[budget])
    run = sanitizer(plan)
    for n in SIZES:
        inputs = features(n, 1, seed=n)
        counts = plan.kept.resolve(n)
        out = run(**inputs)
        assert out["kept_tokens"].shape == (1, counts.kept, D)
        if counts.kept:
            rows, index = expected(method, counts, *(array[0] for array in inputs.values()))
            assert out["kept_index"].tolist() == [index], n
            np.testing.assert_allclose(out["kept_tokens"][0], rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("library", ["ort-cpu", "openvino"])
@pytest.mark.parametrize("method", ["uniform", "random", "fastervlm", "dart"])
def test_shares_of_the_largest_images_are_exact_where_shapes_have_32_bits(method: str, library: str) -> None:
    n = 10_000
    plan = load_method(method)(facts(most=n), BUDGETS["prune-66.7"])
    assert plan.sanitizer is not None
    kept = graphs.loaded(plan.sanitizer, library)(**features(n, 1))["kept_index"]
    assert kept.shape == (1, plan.kept.resolve(n).kept)


def test_the_shares_of_the_longest_clip_fit_into_32_bits() -> None:
    for build, budget in product(ALL_METHODS.values(), BUDGETS.values()):
        with suppress(UnreachableBudget):
            kept = build(facts(), budget).kept
            assert all(share.numerator * 200_000 < 2**31 for share in (kept.reserve, kept.diverse, *kept.stages))


@pytest.mark.parametrize("method", [*BEFORE_LLM, "random", "vscan"])
def test_a_clips_frames_are_one_group_or_apart(method: str) -> None:
    inputs = features(6, 4)
    inputs["deepstack"] = np.random.default_rng(7).standard_normal((4, 6, 2 * D)).astype(np.float32)
    whole = {name: array.reshape(1, 24, *array.shape[2:]) for name, array in inputs.items()}
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
        one = each(**{name: array[group : group + 1] for name, array in inputs.items()})
        for name, array in one.items():
            np.testing.assert_array_equal(frames[name][group], array[0])


@pytest.mark.parametrize("method", [*BEFORE_LLM, "random"])
def test_deepstack_goes_with_its_tokens(method: str) -> None:
    """Which tokens are kept is chosen by the tokens alone; what goes with them is gathered, and merged, alike."""
    sets, n = 3, 101
    inputs = features(n, 1)
    beside = np.random.default_rng(5).standard_normal((1, n, sets * D)).astype(np.float32)
    budget = BUDGETS["prune-77.8"]
    plain = sanitizer(load_method(method)(facts(), budget))(**inputs)
    plan = load_method(method)(facts(deepstack=sets), budget)
    out = sanitizer(plan)(**inputs, deepstack=beside)
    np.testing.assert_array_equal(out["kept_index"], plain["kept_index"])
    np.testing.assert_allclose(out["kept_tokens"], plain["kept_tokens"], atol=1e-6)
    index = out["kept_index"][0]
    rows = beside[0, index]
    if method.startswith("visionzip"):
        counts = plan.kept.resolve(n)
        whole, _ = visionzip(
            *(array[0] for array in inputs.values()),
            counts.kept,
            filtered=method != "visionzip",
            contextual=counts.diverse,
            beside=beside[0],
        )
        rows = whole[:, D:]
    elif method == "sinkpruner-no-text-pruner":
        outliers = np.argsort(-inputs["norms"][0], kind="stable")[:2]
        rows = np.concatenate([beside[0, outliers].mean(axis=0, keepdims=True), rows[1:]])
    np.testing.assert_allclose(out["kept_deepstack"][0], rows, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("method", ["divprune", "dart", "prunesid", "fastervlm", "visionzip", "random", "fastv"])
def test_more_than_topk_gives_is_rejected_with_the_size_that_fits(method: str) -> None:
    with pytest.raises(BudgetError, match=r"keeps \d+ in one step; TensorRT's TopK gives at most 3840.*--max-pixels"):
        load_method(method)(facts(most=20_000, precision="fp16"), BUDGETS["prune-66.7"])
