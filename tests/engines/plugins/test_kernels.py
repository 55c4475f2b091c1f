"""In Triton's interpreter the kernels select the tokens of the numpy reference and of the ONNX function bodies.

With a GPU the same cases run the shipped binaries (`pytest -m gpu`).

Indices must be equal, so rounding must not decide any case. Cosines are far apart, or rows are equal, or their
elements are a few small powers of two, with the same cosines in any arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sanitizer_kernels
from sinkprune.contract.errors import BackendError
from sinkprune.engines.plugins.launches import KernelRunner
from sinkprune.runtime.device.cuda import open_device
from support.models import graphs
from support.programs.slow_cases import slow_except
from support.references import reference
from support.stand_ins import kernel_runs
from support.stand_ins.kernel_runs import Runner

Array = np.ndarray[Any, Any]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The largest and the smallest magnitude of a row.
EXTREMES = {torch.float32: (1e37, 1e-37), torch.float16: (6e4, 1e-4), torch.bfloat16: (1e37, 1e-37)}
AGAIN = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Iterator[Runner]:
    if request.param == "gpu":
        try:
            yield kernel_runs.on(open_device(), KernelRunner())
        except BackendError as error:
            pytest.skip(str(error))
    else:
        pytest.importorskip("triton")
        with kernel_runs.interpreter() as interpret:
            yield interpret


def few_values(rng: np.random.Generator, n: int, width: int) -> Array:
    """Return [n,width] rows with one or four elements of one magnitude, some zero: cosines are multiples of 1/4."""
    rows = np.zeros((n, width))
    for row in rows:
        places = rng.choice(width, rng.choice([0, 1, min(4, width)]), replace=False)
        if len(places) in (1, 4):
            row[places] = rng.choice([-1.0, 1.0], len(places)) * 2.0 ** rng.integers(-3, 4)
    return rows


def spread(rng: np.random.Generator, n: int, width: int) -> Array:
    """Return [n,width] rows in one plane, with angles that are far apart."""
    angles = rng.permutation(np.cumsum(rng.uniform(1, 1.5, n))) * (np.pi / (3 * n))
    plane = np.linalg.qr(rng.normal(size=(width, 2)))[0]
    return np.stack([np.cos(angles), np.sin(angles)], axis=1) @ plane.T


def assert_diverse(
    run: Runner, tokens: torch.Tensor, candidate: Array, reserved: Array, count: int, rounds: int
) -> None:
    """Compare with the reference, group by group; `candidate` [G,N] bool, `reserved` [G,R]."""
    case = kernel_runs.diversity(
        tokens, torch.from_numpy(candidate), torch.from_numpy(reserved.astype(np.int64)), count, rounds
    )
    chosen = run(case)["chosen"].tolist()
    for group, rows in enumerate(tokens.to(torch.float64).numpy()):
        allowed = np.flatnonzero(candidate[group]).tolist()
        expected = reference.diversity(rows, allowed, reserved[group].tolist(), count, rounds)
        assert chosen[group] == sorted(expected)


def assert_top(run: Runner, tokens: torch.Tensor, norms: Array, count: int) -> None:
    """Compare with the reference, group by group."""
    out = run(kernel_runs.top_rho(tokens, torch.from_numpy(norms.astype(np.float32)), count))
    eps = torch.finfo(tokens.dtype).eps
    for group, rows in enumerate(tokens.to(torch.float64).numpy()):
        top = reference.largest(norms[group].astype(np.float32), count)
        assert np.flatnonzero(out["outlier"][group]).tolist() == sorted(top)
        assert set(out["outlier"][group].tolist()) <= {0, 1}
        mean, size = rows[top].mean(axis=0), np.abs(rows[top]).max(initial=0)
        np.testing.assert_allclose(out["sink"][group, 0].double().numpy(), mean, rtol=0, atol=2 * eps * size + 1e-6)


@pytest.mark.parametrize(
    ("dtype", "groups", "n", "width", "count"),
    [
        pytest.param("float32", 1, 1, 1, 1, id="one token"),
        pytest.param("float16", 1, 130, 64, 130, id="all tokens"),
        pytest.param("float32", 2, 33, 80, 3, id="two blocks of columns"),
        pytest.param("bfloat16", 2, 33, 7, 5, id="fewer columns than a block"),
        pytest.param("float16", 1, 1100, 3, 11, id="two chunks"),
    ],
)
def test_top_rho(run: Runner, dtype: str, groups: int, n: int, width: int, count: int) -> None:
    rng = np.random.default_rng(n)
    tokens = torch.from_numpy(rng.normal(size=(groups, n, width))).to(getattr(torch, dtype))
    assert_top(run, tokens, rng.integers(0, 9, (groups, n)) / 4, count)


@given(
    norms=st.lists(st.sampled_from([0.0, -0.0, 1e-45, 1.0, 1.0000001, 256.0, 3e38]), min_size=1, max_size=40),
    data=st.data(),
)
@AGAIN
def test_ties_in_norm_go_to_the_lower_index(run: Runner, norms: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(norms)))
    assert_top(run, torch.arange(len(norms) * 2.0).view(1, -1, 2), np.array([norms]), count)


@pytest.mark.parametrize(
    ("dtype", "groups", "n", "width", "reserves", "count", "rounds"),
    [
        pytest.param("float32", 1, 1, 1, 0, 1, 1, id="one token"),
        pytest.param("float16", 1, 5, 2, 0, 5, 1, id="nothing reserved, all chosen"),
        pytest.param("bfloat16", 2, 40, 20, 3, 5, 1, id="fewer than the most at once"),
        pytest.param("float32", 1, 33, 64, 33, 18, 1, id="all reserved, and candidates still"),
        pytest.param("bfloat16", 1, 45, 70, 35, 7, 2, id="more reserved than a tile, a last round cut short"),
        pytest.param("float16", 1, 37, 16, 1, 3, 8, id="one token a round"),
        pytest.param("float16", 1, 1060, 4, 1, 30, 1, id="two chunks of tokens"),
    ],
)
def test_diversity_select(
    run: Runner, dtype: str, groups: int, n: int, width: int, reserves: int, count: int, rounds: int
) -> None:
    rng = np.random.default_rng(n)
    tokens = torch.from_numpy(np.stack([few_values(rng, n, width) for _ in range(groups)])).to(getattr(torch, dtype))
    reserved = np.stack([rng.choice(n, reserves, replace=False) for _ in range(groups)])
    candidate = np.stack(
        [np.isin(np.arange(n), rng.choice(n, (n + count) // 2, replace=False)) for _ in range(groups)]
    )
    assert_diverse(run, tokens, candidate, reserved, count, rounds)


def test_the_farthest_is_chosen_where_no_two_are_alike(run: Runner) -> None:
    rng = np.random.default_rng(3)
    tokens = torch.from_numpy(np.stack([spread(rng, 31, 24) for _ in range(2)])).float()
    candidate = np.arange(31)[None] % 7 != np.array([[0], [3]])
    assert_diverse(run, tokens, candidate, np.array([[0, 7], [3, 10]]), 8, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_magnitude(run: Runner, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(5)
    largest, smallest = EXTREMES[dtype]
    exponents = rng.integers(np.ceil(np.log2(smallest)), np.floor(np.log2(largest)), (30, 1))
    rows = np.sign(few_values(rng, 30, 6)) * 2.0**exponents
    tokens = torch.from_numpy(rows)[None].to(dtype)
    assert torch.isfinite(tokens).all()
    assert_diverse(run, tokens, np.ones((1, 30), bool), np.array([[4, 9]]), 7, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_rows_tie_wherever_they_stand(run: Runner, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(6)
    # Three rows, over and over, in another order in each block of rows; long, so that sums round.
    rows = rng.normal(size=(3, 200))[rng.integers(0, 3, 67)]
    tokens = torch.from_numpy(rows)[None].to(dtype)
    assert_diverse(run, tokens, np.ones((1, 67), bool), np.array([[17]]), 30, 1)


def test_rows_like_one_that_is_kept_are_as_good_as_each_other(run: Runner) -> None:
    # A third of a row is no power of two of it, so their cosine rounds to either side of 1.
    kept = np.random.default_rng(7).normal(size=(8, 5))
    tokens = torch.from_numpy(np.concatenate([kept, kept / 3, kept / 7]))[None].float()
    assert_diverse(run, tokens, (np.arange(24) >= 8)[None], np.arange(8)[None], 8, 1)


@pytest.mark.slow
def test_the_most_tokens_there_may_be(run: Runner) -> None:
    rng = np.random.default_rng(10)
    n = 1 << 15
    tokens = torch.from_numpy(rng.choice([-2.0, -1.0, 0.0, 1.0], (1, n, 1))).half()
    assert_top(run, tokens, rng.integers(0, 99, (1, n)), -(-n // 100))
    assert_diverse(run, tokens, rng.random((1, n)) < 0.5, rng.integers(n - 9, n, (1, 3)), 20, 1)


@given(data=st.data(), n=st.integers(1, 36), rounds=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
@AGAIN
def test_any_small_case(run: Runner, data: st.DataObject, n: int, rounds: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    candidate = rng.random((1, n)) < 0.7
    candidate[0, rng.integers(n)] = True
    tokens = torch.from_numpy(few_values(rng, n, data.draw(st.integers(1, 9), label="width"))[None])
    reserved = rng.choice(n, (1, data.draw(st.integers(0, n), label="reserves")), replace=False)
    count = data.draw(st.integers(1, int(candidate.sum())), label="count")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    assert_diverse(run, tokens.to(dtype), candidate, reserved, count, rounds)


@pytest.mark.parametrize("dtype", slow_except({"float16"}, ["float32", "float16"]))
def test_the_function_bodies_in_onnx_runtime_agree(run: Runner, dtype: str) -> None:
    rng = np.random.default_rng(9)
    n, width = 31, 36
    shape = sanitizer_kernels.Shape(groups=2, tokens=n, width=width, reserve=5, diverse=6, rounds=2, dtype=dtype)
    tokens = np.stack([few_values(rng, n, width), spread(rng, n, width) * 8]).astype(dtype)
    norms = rng.integers(0, 3, (2, n)).astype(np.float32)
    reserved = np.stack([rng.choice(n, shape.reserve, replace=False) for _ in range(2)])
    candidate = ~np.stack([np.isin(np.arange(n), row) for row in reserved])
    body = graphs.loaded(sanitizer_kernels.bodies(shape))
    expected = body(tokens=tokens, norms=norms, candidate=candidate, reserved=reserved)
    top = run(kernel_runs.top_rho(torch.from_numpy(tokens), torch.from_numpy(norms), shape.outliers))
    np.testing.assert_array_equal(top["outlier"].bool().numpy(), expected["outlier"])
    np.testing.assert_allclose(top["sink"].numpy(), expected["sink"], rtol=2e-3, atol=2e-3)
    arrays = (torch.from_numpy(array) for array in (tokens, candidate, reserved))
    chosen = run(kernel_runs.diversity(*arrays, shape.diverse, shape.rounds))["chosen"]
    np.testing.assert_array_equal(chosen.numpy(), expected["chosen"])
