"""What a token costs grows by reading the cache, and by nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from sinkprune import Pipeline
from support.models.heads_of_64 import CONFIG, export_random

pytestmark = pytest.mark.slow

# Next to no weights, and 67 MB of cache for 2000 rows.
HEADS, SIZE, ROWS = 32, 128, 2000
WIDE: dict[str, Any] = {
    **CONFIG,
    "text_config": {
        **CONFIG["text_config"],
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": SIZE,
    },
}


def seconds(work: Callable[[], Any], times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return median(taken)


@pytest.mark.parametrize("dialect", ["opset24", "opset20"])
def test_a_token_at_many_rows_takes_less_time_than_copying_them(dialect: str, tmp_path: Path) -> None:
    bundle = export_random(tmp_path, WIDE, budgets=("retain-64",), dialect=dialect)
    chain = Pipeline.load(bundle, check_sums=False).chain
    decoder, tensor = chain.decoders[0], chain.backend.tensor

    def call(cache: Any, rows: int) -> None:
        hidden = np.zeros((1, rows, chain.model.hidden_size), np.float32)
        table = np.zeros((1, rows, SIZE // 2), np.float32)
        decoder({"hidden": tensor(hidden), "cos": tensor(table), "sin": tensor(table)}, cache)

    short, long = decoder.new_cache(), decoder.new_cache()
    call(short, 10)
    call(long, ROWS)
    arrays = [buffer.numpy() for buffer in long.buffers.values()]
    assert sum(array.nbytes for array in arrays) > 4 * HEADS * SIZE * ROWS

    def copy_once() -> None:
        for array in arrays:
            array.copy()

    # In turn, so that a slow moment is slow for all.
    rounds = [
        (seconds(lambda: call(short, 1), 5), seconds(lambda: call(long, 1), 5), seconds(copy_once, 2))
        for _ in range(4)
    ]
    few, many, copying = (median(column) for column in zip(*rounds, strict=True))
    assert many - few < copying
