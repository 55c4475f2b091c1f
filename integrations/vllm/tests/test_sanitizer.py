"""The rule against its numpy reference, and the budgets against sinkprune's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sinkprune_vllm.option import FAMILIES, counts_of
from sinkprune_vllm.sanitizer import Counts, cls_salience, select

from sinkprune.contract.budgets import FAMILIES as SINKPRUNE
from sinkprune.contract.budgets import diversity_group
from support.references.reference import sanitize

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
def test_a_batch_of_groups_keeps_what_the_reference_keeps_of_each(tokens: int) -> None:
    rows, counts = groups(tokens), COUNTS[tokens]
    salience = np.random.default_rng(1).integers(0, 4, rows.shape[:2]).astype(np.float32)
    kept, index = select(torch.from_numpy(rows), torch.from_numpy(salience), counts)
    for group, own in enumerate(rows):
        norms = torch.from_numpy(own).norm(dim=-1).numpy()
        expected, source = sanitize(
            own,
            norms,
            salience[group],
            reserve=counts.reserve,
            diverse=counts.diverse,
            per_mille=1000 * counts.outliers // tokens,
        )
        assert index[group].tolist() == source
        np.testing.assert_allclose(kept[group].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_scores_are_fp32_in_fp16() -> None:
    # Squares of these rows pass fp16's maximum.
    rows = np.random.default_rng(0).normal(0, 300, (1, 64, 12)).astype(np.float16)
    salience = torch.arange(64.0)[None]
    kept, index = select(torch.from_numpy(rows), salience, COUNTS[64])
    assert kept.dtype == torch.float16
    assert index.equal(select(torch.from_numpy(rows.astype(np.float32)), salience, COUNTS[64])[1])


def test_salience_is_the_sum_over_heads_of_the_cls_row_of_attention() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 10, 3, 8), torch.randn(2, 10, 3, 8)
    logits = torch.einsum("gqhd,gkhd->ghqk", query, key) / 8**0.5
    expected = logits.softmax(-1)[:, :, 0, 1:].sum(1)
    torch.testing.assert_close(cls_salience(query[:, 0], key), expected)


@pytest.mark.parametrize(("family", "architecture"), [("llava", "Llava"), ("llava-next", "LlavaNext")])
@pytest.mark.parametrize("tokens", [576, 256, 64, 1])
def test_budgets_are_those_of_sinkprune(family: str, architecture: str, tokens: int) -> None:
    own, theirs = FAMILIES[f"{architecture}ForConditionalGeneration"], SINKPRUNE[family].budgets
    assert own.budgets.keys() == theirs.keys()
    for name, budget in theirs.items():
        counts, expected = counts_of(own, name, tokens), budget.resolve(tokens)
        assert counts == (expected.outliers, expected.reserve, expected.diverse)
        assert counts.diversity_group == diversity_group(counts.diverse, budget.diversity_rounds)
