"""Plants outlier tokens into a vision tower's output, to compare pruning methods on them.

The paper finds in large towers that about 1 % of the tokens, in background, have large norms. They draw the attention
of the CLS token and hold no information about their place (method.md section 1). This module adds such tokens to a
tower without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sinkprune.runtime.backends import Backend, Engine, Tensor

_PER_MILLE = 10
_NORM = 4.0
"""The norm of a planted token, in medians of its group."""


def plant_in_vision(graph: str, engine: Engine, backend: Backend) -> Engine:
    """Wrap the engine of the graph `vision` to plant outliers in its output; return any other engine unchanged.

    For `wrap` of `Pipeline.load`.
    """
    names = ("tokens", "norms", "salience")

    def with_outliers(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        features = engine(inputs)
        arrays = plant_outliers(*(backend.numpy(features[name]) for name in names))
        planted = {name: backend.tensor(array) for name, array in zip(names, arrays, strict=True)}
        return {**features, **planted}

    return with_outliers if graph == "vision" else engine


def plant_outliers(tokens: NDArray[Any], norms: NDArray[Any], salience: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Turn the least salient 1 % of each group's tokens (at least one) into outliers; returns copies.

    `tokens` [G,N,D] float, `norms` [G,N] and `salience` [G,N] fp32. A planted token points where the group's mean
    does, at 4 times the group's median norm, and is as salient as the group's most salient token.
    """
    tokens, norms, salience = tokens.copy(), norms.copy(), salience.copy()
    count = -(-norms.shape[1] * _PER_MILLE // 1000)
    for group in range(len(norms)):
        background = np.argsort(salience[group], kind="stable")[:count]
        mean = tokens[group].astype(np.float32).mean(axis=0)
        norm = _NORM * float(np.median(norms[group]))
        tokens[group, background] = mean * (norm / max(float(np.linalg.norm(mean)), 1e-6))
        norms[group, background] = norm
        salience[group, background] = salience[group].max()
    return tokens, norms, salience
