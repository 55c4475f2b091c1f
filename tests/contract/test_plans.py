"""Plans and decoder segments, as a bundle's manifest tells of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BudgetError


def test_segments_follow_the_cuts(bundle: Callable[..., Path]) -> None:
    manifest = read_bundle(bundle("gqa-112")).manifest
    assert manifest.cut_after == (1, 2, 4)
    assert manifest.segments == (range(2), range(2, 3), range(3, 5), range(5, 8))


def test_plans_are_found_by_method_and_budget(bundle: Callable[..., Path]) -> None:
    manifest = read_bundle(bundle("gqa-112")).manifest
    assert manifest.plan("sinkpruner", "none") is None
    plan = manifest.plan("sinkpruner", "retain-64")
    assert plan is not None
    assert plan.counts == manifest.budgets["retain-64"].resolve(64)
    assert list(plan.select_after) == ["1", "2", "4"]
    with pytest.raises(BudgetError, match=r"no budget 'rho-5'.*none, retain-192, .*No export has it: .*'rho-5'"):
        manifest.plan("sinkpruner", "rho-5")
    with pytest.raises(BudgetError, match=r"no budget 'retain-64\+serial'.*sinkprune-export --budgets"):
        manifest.plan("sinkpruner", "retain-64+serial")
    with pytest.raises(BudgetError, match=r"no budget 'prune-80'.* No export has it: .*'llava' has: retain-192"):
        manifest.plan("sinkpruner", "prune-80")
    for budget in ("none", "retain-64"):
        with pytest.raises(BudgetError, match=r"no method 'magic'.*holds: sinkpruner\..*sinkprune-export --methods"):
            manifest.plan("magic", budget)
