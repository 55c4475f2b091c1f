"""Passes over several rows at once, whose logits score texts that are known."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Tensor
from sinkprune.runtime.steps.chain import Chain
from sinkprune.runtime.steps.decoding import KVCache, run_rows


def logits_of_rows(chain: Chain, cache: KVCache, rows: Array) -> Iterator[Array]:
    """Run a pass over `rows` [S,d], which follow those of `cache`, and yield the logits [vocab] after each."""
    if chain.resumes:
        whole = run_rows(chain, cache, rows)
        results: Iterator[Tensor] = (chain.backend.join([whole], np.array([place])) for place in range(len(rows)))
    else:
        results = (run_rows(chain, cache, row[None]) for row in rows)
    for hidden in results:
        logits: Array = chain.backend.numpy(chain.last({"hidden": hidden})["logits"])[0]
        yield logits
