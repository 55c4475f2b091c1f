"""Plants outlier tokens into a vision tower's output, to see how pruning methods cope with them.

What the paper finds in large towers: about 1 % of the tokens, in background, have large norms, draw the attention of
the CLS token and say nothing of their place (method.md section 1). A tower without them can be given some.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sinkprune.runtime.backends import Backend, Engine, Tensor

_PER_MILLE = 10
# Of a planted token, in median norms of its group.
_NORM = 4.0


def plant_in_vision(graph: str, engine: Engine, backend: Backend) -> Engine:
    """The engine of the graph `vision` with outliers planted in what it gives, any other as it is.

    For `wrap` of `Pipeline.load`.
    """
    names = ("tokens", "norms", "salience")

    def planted(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        features = engine(inputs)
        arrays = plant_outliers(*(backend.numpy(features[name]) for name in names))
        return {name: backend.tensor(array) for name, array in zip(names, arrays, strict=True)}

    return planted if graph == "vision" else engine


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
