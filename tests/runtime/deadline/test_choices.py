"""The budgets that a request may run at."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sinkprune import Pipeline
from sinkprune.runtime.deadline.choices import budgets_up_to, runnable
from sinkprune.runtime.steps.request import new_request


def test_budgets_up_to_another_the_largest_first(pipeline: Callable[..., Pipeline]) -> None:
    small, request = pipeline("gqa-112"), new_request(np.zeros((8, 8, 3), np.uint8), "What?", max_new_tokens=4)
    layouts, manifest = [*small.family.largest().values()], small.bundle.manifest
    for budget, count in (("none", 5), ("retain-64", 2)):
        choices = budgets_up_to(manifest, "sinkpruner", budget, layouts)
        # Whatever the order of the candidates.
        found = [choice.budget for choice in runnable(manifest, None, request, choices[::-1], 20, layouts)]
        assert found == ["none", "retain-192", "retain-128", "retain-64", "retain-32"][-count:]
