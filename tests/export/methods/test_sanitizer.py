"""The `sanitizer` graph keeps what the numpy reference keeps, index for index."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.contract.budgets import OPTIONS, Budget, Share, parse_budget
from support.models import graphs
from support.models.token_features import KINDS, token_features
from support.programs.slow_cases import each_once, slow_except
from support.references import reference

Array = np.ndarray[Any, Any]
DTYPES = {"fp32": np.float32, "fp16": np.float16}
RETAIN_64 = parse_budget("llava", "retain-64")


def budget_of(n: int, reserve: int, diverse: int, **options: Any) -> Budget:
    """`reserve` and `diverse` of `n` tokens, counts, not shares."""
    return Budget(Share(reserve, n), Share(diverse, n), (Share(1, n),) * 3, **options)


def assert_equals_reference(
    budget: Budget,
    precision: str,
    tokens: Array,
    norms: Array,
    salience: Array,
    method: str = "sinkpruner",
    **rule: Any,
) -> None:
    """Compare the graph of `method` with the reference and its `rule`, group by group."""
    _, n, d = tokens.shape
    tokens = tokens.astype(DTYPES[precision])
    norms, salience = norms.astype(np.float32), salience.astype(np.float32)
    out = graphs.method_sanitizer(method, n, d, budget, precision)(tokens=tokens, norms=norms, salience=salience)
    assert out["kept_tokens"].dtype == DTYPES[precision]
    for group, kept_index in enumerate(out["kept_index"]):
        kept, index = reference.sanitize_at(budget, tokens[group], norms[group], salience[group], **rule)
        assert kept_index.tolist() == index
        sink = int(budget.remove_outliers and budget.aggregate)
        np.testing.assert_array_equal(out["kept_tokens"][group, sink:], kept[sink:])
        tolerance = 1e-5 if precision == "fp32" else 1e-3
        found, close = out["kept_tokens"][group].astype(np.float64), tolerance * np.abs(kept).max(initial=0)
        np.testing.assert_allclose(found, kept, rtol=tolerance, atol=close)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(("groups", "kind"), each_once([1, 5], [*KINDS, "large norms"]))
def test_retain_64_equals_the_reference(kind: str, precision: str, groups: int) -> None:
    features = token_features(kind, groups, precision=precision)
    assert np.isfinite(features["tokens"]).all()
    assert_equals_reference(RETAIN_64, precision, **features)


@pytest.mark.parametrize("option", ["raster", "drop-sink", "keep-outliers", "no-diversity"])
@pytest.mark.parametrize("kind", ["tied", "outliers"])
def test_every_option_equals_the_reference(option: str, kind: str) -> None:
    budget = OPTIONS[option](parse_budget("llava", "retain-128"))
    assert_equals_reference(budget, "fp32", **token_features(kind, 3, n=64))


@pytest.mark.parametrize(
    ("method", "rule"), [("sinkpruner-paper", {"rounds": 1}), ("sinkpruner+centred", {"centring": True})]
)
@pytest.mark.parametrize(("kind", "precision"), each_once([*KINDS, "large norms"], DTYPES))
def test_other_rules_of_diversity_equal_the_reference(
    method: str, rule: dict[str, Any], kind: str, precision: str
) -> None:
    features = token_features(kind, 2, n=144, precision=precision)
    assert_equals_reference(parse_budget("llava", "retain-128"), precision, **features, method=method, **rule)


@pytest.mark.parametrize(("n", "outliers"), [(576, 6), (480, 5), (2880, 29), (1000, 10), (101, 2), (100, 1), (1, 1)])
def test_sink_is_the_mean_of_one_percent_rounded_up(n: int, outliers: int) -> None:
    norms = np.arange(1, n + 1, dtype=np.float32)[None]
    run = graphs.sanitizer(n, 1, budget_of(n, 0, 0))
    # Squares, whose mean over the last `outliers` tells how many they were.
    out = run(tokens=norms[..., None] ** 2, norms=norms, salience=norms)
    assert out["kept_tokens"][0, 0, 0] == pytest.approx(np.mean(norms[0, n - outliers :] ** 2), rel=1e-6)
    assert out["kept_index"].tolist() == [[n - 1]]


def test_kept_tokens_worked_by_hand() -> None:
    east, north, up = np.eye(3, dtype=np.float32)
    tokens = np.stack([east, 9 * up, 7 * north, east + north, -east, 2 * up, 0 * up, 3 * east])
    norms = np.array([1, 9, 7, 1.4, 1, 2, 0, 3], np.float32)
    salience = np.array([5, 9, 1, 2, 0, 0, 0, 5], np.float32)
    run = graphs.sanitizer(8, 3, budget_of(8, 1, 3, outlier_per_mille=130))
    out = run(tokens=tokens[None], norms=norms[None], salience=salience[None])
    # H = {1, 2}: ceil(1.04). RES = {0}, which ties with 7. Then cosines with east: 4 is -1; 5 and 6 are 0, so 5;
    # last 6, at 0 to all of them.
    assert out["kept_index"].tolist() == [[1, 0, 4, 5, 6]]
    np.testing.assert_allclose(out["kept_tokens"][0, 0], [0, 3.5, 4.5])


_ROWS = [row for row in product((-1.0, 0.0, 1.0), repeat=4) if np.count_nonzero(row) in (0, 1, 4)]
_SCALES = {"fp32": [1.0, 3.0, 0.1, 1e-42, 1e-30, 1e30], "fp16": [1.0, 3.0, 0.1, 6e-8, 300.0, 6e4]}
_NORMS = [0.0, 1e-30, 1.0, 2.0, 300.0, 3e38]
_SALIENCE = [0.0, 1e-30, 0.25, 0.5, -1.0, 3e38, -3e38]
_LIMITS = [
    # n, reserve, diverse, per mille, rounds
    (1, 1, 1, 10, 1),
    (2, 0, 1, 10, 1),
    (2, 1, 1, 10, 1),
    # The sink alone, nothing left for diversity, and more reserved than there is
    (6, 0, 0, 10, 1),
    (6, 5, 5, 10, 1),
    (6, 9, 9, 10, 1),
    # A round of 16, and one of 1
    (40, 5, 17, 10, 1),
    (3, 0, 2, 10, 8),
    (5, 2, 2, 400, 1),
    (9, 0, 5, 10, 2),
    (9, 2, 5, 10, 8),
    (12, 3, 7, 200, 2),
    (12, 3, 7, 200, 1),
]


@pytest.mark.parametrize(
    ("n", "reserve", "diverse", "per_mille", "rounds", "precision"),
    slow_except(
        [(*limits, precision) for limits, precision in zip(_LIMITS, cycle(DTYPES), strict=False)],
        [(*limits, precision) for limits in _LIMITS for precision in DTYPES],
    ),
)
def test_ties_duplicates_zeros_and_extremes(
    n: int, reserve: int, diverse: int, per_mille: int, rounds: int, precision: str
) -> None:
    budget = budget_of(n, reserve, diverse, outlier_per_mille=per_mille, diversity_rounds=rounds)
    token = st.tuples(*map(st.sampled_from, (_ROWS, _SCALES[precision], _NORMS, _SALIENCE)))

    @settings(max_examples=50, deadline=None, derandomize=True, database=None)
    @given(st.lists(token, min_size=n, max_size=n))
    def holds(drawn: list[tuple[tuple[float, ...], float, float, float]]) -> None:
        rows, scales, norms, salience = (np.array(column) for column in zip(*drawn, strict=True))
        tokens = rows * scales[:, None]
        assert_equals_reference(budget, precision, tokens[None], norms[None], salience[None])

    holds()
