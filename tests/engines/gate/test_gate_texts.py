"""The answers of all engines: where two texts part, the graphs must find both tokens nearly as likely."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.contract.engines_manifest import Limits
from sinkprune.contract.errors import EnginesError
from sinkprune.engines.build import build_engines
from sinkprune.engines.gate.comparing import Gate, compare_texts, row_differences
from sinkprune.engines.gate.recording import NEW_TOKENS, GateQuestion, Recording, record
from sinkprune.engines.gate.report import gap_limit
from sinkprune.engines.progress import SILENT
from sinkprune.engines.targets.onnxruntime import OnnxRuntimeBuilder
from sinkprune.runtime.backends import Backend, Engine
from support.stand_ins.gate_faults import plant, scaled


@pytest.fixture(scope="module")
def source(bundle: Callable[..., Path]) -> Bundle:
    return read_bundle(bundle("gqa-112", budgets=("retain-64",)))


@pytest.fixture(scope="module")
def question(photo: Image.Image) -> GateQuestion:
    return GateQuestion([photo], "What is on the table?")


@pytest.fixture(scope="module")
def recording(source: Bundle, question: GateQuestion, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(source, question, tmp_path_factory.mktemp("texts") / "recording", SILENT)


def raised(token: int, place: int = 0) -> Any:
    """Return a `Wrap` that raises the logit of one token from the new token `place` on."""
    calls = 0

    def wrap(graph: str, engine: Engine, backend: Backend) -> Engine:
        if graph != "head":
            return engine

        def louder(inputs: Mapping[str, Any]) -> dict[str, Any]:
            nonlocal calls
            logits = backend.numpy(engine(inputs)["logits"])
            logits[..., token] += 1e3 if calls >= place else 0
            calls += 1
            return {"logits": backend.tensor(logits)}

        return louder

    return wrap


@pytest.mark.parametrize("place", [0, 3])
def test_the_gap_is_that_of_the_graphs_logits(
    place: int, source: Bundle, question: GateQuestion, recording: Recording
) -> None:
    expected = recording.logits(0)[place].astype(np.float64)
    second = int(np.argsort(expected)[-2])
    gap = float((expected.max() - expected[second]) / expected.std())
    fp32, int8 = (
        compare_texts(Pipeline.load(source, wrap=raised(second, place)), question, recording, rounding)[0]
        for rounding in ("fp32", "int8")
    )
    assert fp32.same_tokens == place
    assert fp32.gap == pytest.approx(gap)
    assert not fp32.passed
    assert int8.passed == (gap <= 0.5)
    assert len(recording.answers[0].token_ids) == NEW_TOKENS
    assert fp32.kept_alike == 1


def test_a_chain_that_keeps_other_tokens_has_no_gap_limit() -> None:
    assert gap_limit("fp32", 0.99) is None
    assert gap_limit("fp32", 1) == 1e-3
    assert gap_limit("int8", 1) == 0.5


def test_the_same_text_passes(source: Bundle, question: GateQuestion, recording: Recording) -> None:
    texts = compare_texts(Pipeline.load(source), question, recording, "fp32")
    assert [(text.same_tokens, text.gap, text.passed, text.found) for text in texts] == [
        (NEW_TOKENS, 0.0, True, answer.text) for answer in recording.answers
    ]


def test_wrong_answers_of_a_folder_are_rejected(
    source: Bundle, question: GateQuestion, recording: Recording, tmp_path: Path
) -> None:
    build_engines(source, tmp_path / "out", OnnxRuntimeBuilder(), Limits(60, 10, 1))
    gate = Gate(question)
    gate.record_graphs(source, "onnxruntime", tmp_path / "recording", SILENT)
    gate.check_answers(tmp_path / "out")
    planted = plant(source, tmp_path / "out", "head", scaled("logits", -1), tmp_path)
    with pytest.raises(EnginesError, match=r"each engine passes alone, but the answer of all.* at token 1 of"):
        gate.check_answers(planted)


@pytest.mark.parametrize("kind", ["rows", "values", "logits"])
def test_rows_against_plain_numpy(kind: Any) -> None:
    draw = np.random.default_rng(0)
    expected = draw.standard_normal((2, 5, 7))
    expected[0, 0] *= 1000
    found = expected + 0.01 * draw.standard_normal(expected.shape)
    got = row_differences(kind, found, expected)
    width = 7 if kind == "rows" else 1
    wanted = []
    for own, other in zip(found.reshape(-1, width), expected.reshape(-1, width), strict=True):
        length = np.sqrt((other**2).sum())
        lengths = [np.sqrt((row**2).sum()) for row in expected.reshape(-1, width)]
        floor = np.sqrt((expected**2).mean()) if kind == "logits" else max(length, 0.1 * np.median(lengths))
        wanted.append(np.sqrt(((own - other) ** 2).sum()) / floor)
    np.testing.assert_allclose(got, wanted)
    # A row that is a thousand times larger hides no difference.
    if kind == "rows":
        expected[1, 1, 0] += 1
        assert row_differences(kind, found, expected).max() > 0.1


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_differ_infinitely(wrong: float) -> None:
    found = np.ones((1, 3, 4))
    found[0, 1, 2] = wrong
    assert row_differences("rows", found, np.ones((1, 3, 4))).max() == np.inf
    assert row_differences("rows", np.ones((1, 2, 4)), np.ones((1, 3, 4))).max() == np.inf


def test_indices_are_counted() -> None:
    assert row_differences("indices", np.array([1, 2, 4]), np.array([1, 2, 3])) == [1]
    assert row_differences("indices", np.array([1, 2]), np.array([1, 2, 3])) == [3]
    assert row_differences("indices", np.array([], np.int64), np.array([], np.int64)) == [0]
