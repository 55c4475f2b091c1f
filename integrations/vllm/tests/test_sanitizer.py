"""The rule against its numpy reference, and the budgets against sinkprune's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sinkprune_vllm import sanitizer
from sinkprune_vllm.option import FAMILIES, counts_of
from sinkprune_vllm.sanitizer import Counts, cls_salience, received_attention, select

from sinkprune.contract.budgets import FAMILIES as SINKPRUNE
from sinkprune.contract.budgets import diversity_group
from support.references.reference import beside_kept, sanitize

COUNTS = {
    64: Counts(1, 7, 40),
    # Diverse tokens that fill no whole number of rounds, and every token.
    50: Counts(3, 5, 35),
    20: Counts(1, 10, 9),
    # No diverse tokens, and one token.
    9: Counts(2, 4, 0),
    1: Counts(1, 0, 0),
}


def groups(tokens: int) -> np.ndarray:
    """Return groups whose rows and saliences have whole numbers, so that many scores tie, zeros and duplicates."""
    rng = np.random.default_rng(tokens)
    plain = rng.normal(size=(tokens, 12))
    whole = rng.integers(-1, 2, (tokens, 12))
    zeros = whole * (rng.random((tokens, 1)) < 0.5)
    twins = plain[rng.integers(0, tokens, tokens)]
    huge = whole * 1e4
    return np.stack([plain, whole, zeros, twins, huge, np.ones_like(plain)]).astype(np.float32)


@pytest.mark.parametrize("tokens", COUNTS)
@pytest.mark.parametrize("width", [None, 8])
def test_a_batch_of_groups_keeps_what_the_reference_keeps_of_each(tokens: int, width: int | None) -> None:
    rows, counts = torch.from_numpy(groups(tokens)), COUNTS[tokens]
    salience, others = torch.from_numpy(np.random.default_rng(1).integers(0, 4, (2, *rows.shape[:2])))
    norms = rows.norm(dim=-1) if width is None else others.float()
    kept, index = select(rows, salience, counts, None if width is None else norms, width)
    for group, own in enumerate(rows.numpy()):
        per_mille, own_norms = 1000 * counts.outliers // tokens, norms[group].numpy()
        _, source = sanitize(
            own[:, :width],
            own_norms,
            salience[group].numpy(),
            reserve=counts.reserve,
            diverse=counts.diverse,
            per_mille=per_mille,
        )
        assert index[group].tolist() == source
        expected = beside_kept(own[None], own_norms, source, sink=True, per_mille=per_mille)[0]
        np.testing.assert_allclose(kept[group].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_scores_are_fp32_in_fp16() -> None:
    # Squares of these rows pass fp16's maximum.
    rows = np.random.default_rng(0).normal(0, 300, (1, 64, 12)).astype(np.float16)
    salience = torch.arange(64.0)[None]
    kept, index = select(torch.from_numpy(rows), salience, COUNTS[64])
    assert kept.dtype == torch.float16
    assert index.equal(select(torch.from_numpy(rows.astype(np.float32)), salience, COUNTS[64])[1])


def test_salience_is_attention_summed_over_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "QUERIES", 5)
    torch.manual_seed(0)
    query, key = torch.randn(2, 24, 3, 8)

    def attention(rows: slice) -> torch.Tensor:
        return (torch.einsum("qhd,khd->hqk", query[rows], key[rows]) / 8**0.5).softmax(-1)

    within = [slice(0, 4), slice(4, 16), slice(16, 24)]
    expected = torch.cat([attention(rows).sum((0, 1)) for rows in within])
    torch.testing.assert_close(received_attention(query, key, [4, 12, 8]), expected)
    torch.testing.assert_close(cls_salience(query[None, 0], key[None])[0], attention(slice(24))[:, 0, 1:].sum(0))


@pytest.mark.parametrize("tokens", [576, 256, 64, 1])
def test_budgets_are_those_of_sinkprune(tokens: int) -> None:
    theirs = {row.architecture: row.budgets for row in SINKPRUNE.values()}
    for architecture, own in FAMILIES.items():
        assert own.budgets.keys() == theirs[architecture].keys()
        for name, budget in theirs[architecture].items():
            counts, expected = counts_of(own, name, tokens), budget.resolve(tokens)
            assert counts == (expected.outliers, expected.reserve, expected.diverse)
            assert counts.diversity_group == diversity_group(counts.diverse, budget.diversity_rounds)
