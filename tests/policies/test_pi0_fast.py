"""Chunks of pi0-FAST against a plain reference: unpruned, and with dropped tokens masked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from tests.policies.test_pi0_equals_reference import in_robots_units, normalised, tower_outputs

from sinkprune import Policy
from sinkprune.contract.errors import CheckpointError, NumericsError, UsageError
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.policies.chunk import actions_of
from support.models.pi0_fast_checkpoints import (
    PI0_FAST_SHAPES,
    SCALE,
    SKIP,
    TOKENIZER,
    VOCAB,
    Pi0FastShape,
    make_pi0_fast_checkpoint,
    use_small_preset,
)
from support.references import pi0_fast as plain
from support.references.pi0 import INSTRUCTION, frames

Array = np.ndarray[Any, Any]
BUDGETS = ("prune-66.7", "prune-80+no-sanitizer", "prune-88.9+raster")
CAMERAS = ("top", "wrist")


class Case(NamedTuple):
    shape: Pi0FastShape
    folder: Path
    model: Any
    policy: Policy

    def actions_of(self, tokens: list[int]) -> Array:
        """The normalised actions of tokens, by the reference."""
        folder, shape = self.folder / "action_tokenizer", self.shape
        settings = json.loads((folder / "processor_config.json").read_text())
        return plain.actions_of(tokens, TOKENIZER, folder, shape.chunk, shape.width, SCALE, settings["min_token"])


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Case]]:
    with pytest.MonkeyPatch.context() as monkeypatch:

        @cache
        def get(name: str, dialect: str = "opset24") -> Case:
            shape, folder = PI0_FAST_SHAPES[name], tmp_path_factory.mktemp(name) / "policy"
            model = make_pi0_fast_checkpoint(folder, shape)
            use_small_preset(monkeypatch, model.config)
            export_bundle(
                ExportRequest(str(folder), budgets=BUDGETS, dialect=dialect),  # type: ignore[arg-type]
                folder / "bundle",
            )
            return Case(shape, folder, model, Policy.load(folder / "bundle"))

        yield get


@pytest.mark.parametrize(
    ("name", "budget", "dialect"),
    [
        ("pi0-fast", None, "opset24"),
        ("pi0-fast-odd", None, "opset24"),
        *(("pi0-fast", budget, "opset24") for budget in BUDGETS),
        ("pi0-fast-odd", "prune-66.7", "opset24"),
        ("pi0-fast", "prune-66.7", "opset20"),
    ],
)
def test_chunks_equal_the_reference(
    name: str, budget: str | None, dialect: str, case: Callable[..., Case], photo: Image.Image
) -> None:
    own = case(name, dialect)
    shape = own.shape
    state = np.random.default_rng(2).uniform(-2, 2, shape.state).astype(np.float32)
    seen = frames(photo, 2)
    towers = tower_outputs(own.policy, seen)
    ids = plain.prompt_ids(TOKENIZER, INSTRUCTION, normalised(own.policy, state))
    prompt, sources = plain.masked_prompt(own.model, towers, ids, budget)
    tokens = plain.tokens_of(own.model, prompt, len(towers[0][0]), shape.most, budget)
    assert len(set(tokens)) > 1
    expected = own.actions_of(tokens)
    assert np.abs(expected).max() > 0.1
    report = own.policy.act(seen, INSTRUCTION, state, budget=budget or "none")
    np.testing.assert_allclose(report.actions, in_robots_units(own.policy, expected), atol=1e-4)
    assert report.prompt_tokens == len(ids) and report.flops.expert > 0
    assert [kept.index.ravel().tolist() for kept in report.images] == sources


def test_actions_follow_the_tokens(case: Callable[..., Case]) -> None:
    """`Action: ` is left out, `|` ends, long text is cut and short is filled; others are errors."""
    own = case("pi0-fast")
    shape, facts, tokenizer = own.shape, own.policy.facts, own.policy._model.prompts.tokenizer
    assert facts.fast is not None
    begin, end = TOKENIZER.encode("Action: ", add_special_tokens=False), TOKENIZER.convert_tokens_to_ids("|")
    assert len(begin) == 3 and end != TOKENIZER.unk_token_id
    last, random = VOCAB - 1 - SKIP, np.random.default_rng(3)

    def check(given: list[int], counted: list[int], number: int) -> None:
        expected = own.actions_of(counted)
        # Later tokens are not asked for.
        actions, found = actions_of(iter(given), facts, tokenizer)
        np.testing.assert_allclose(actions[0], expected, atol=1e-5)
        assert (actions.shape, found) == ((1, shape.chunk, shape.width), number)

    pieces = facts.fast.pieces
    few = (last - random.integers(0, len(pieces), 3)).tolist()
    many = (last - random.integers(0, len(pieces), shape.most)).tolist()
    check([*begin, *few, end, 5], few, 7)
    check([*few, *begin, end], few, 7)
    check([*begin, *begin, *few, end], few, 9)
    check([*many, 5], many, shape.most)
    check([end], [], 1)
    longest = [last - max(range(len(pieces)), key=lambda token: len(pieces[token]))] * 9
    check(longest, longest, 9)
    for wrong in (last + 1, last - len(pieces)):
        with pytest.raises(NumericsError, match=r"the token .* as one of FAST, which has"):
            actions_of([wrong, end], facts, tokenizer)
    strict = replace(facts, fast=replace(facts.fast, begins=True))
    check_begin = actions_of([*begin, *few, end], strict, tokenizer)[0]
    np.testing.assert_array_equal(check_begin, actions_of([*few, end], facts, tokenizer)[0])
    with pytest.raises(NumericsError, match="does not begin with 'Action:'"):
        actions_of(count(), strict, tokenizer)


def test_a_folder_without_its_tokenizer_names_the_option(
    case: Callable[..., Case], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    own = case("pi0-fast-odd")
    folder = Path(shutil.copytree(own.folder, tmp_path / "policy"))
    path = folder / "policy_preprocessor.json"
    steps = json.loads(path.read_text())
    for step in steps["steps"]:
        step.pop("artifacts", None)
    path.write_text(json.dumps(steps))
    shutil.move(folder / "action_tokenizer", tmp_path / "fast")

    def changed(**fields: Any) -> ExportRequest:
        config = json.loads((own.folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))
        return ExportRequest(str(folder), action_tokenizer=str(tmp_path / "fast"), budgets=BUDGETS[:1])

    with pytest.raises(CheckpointError, match="Add --action-tokenizer lerobot/fast-action-tokenizer"):
        export_bundle(ExportRequest(str(folder)), tmp_path / "bundle")
    with pytest.raises(CheckpointError, match=r"temperature is 0\.5, expected 0"):
        export_bundle(changed(temperature=0.5), tmp_path / "bundle")
    with pytest.raises(CheckpointError, match=r"type 'pi0fast'\. Supported types: pi0, pi05, pi0_fast"):
        export_bundle(ExportRequest(str(changed(type="pi0fast").source)), tmp_path / "bundle")
    export_bundle(changed(), tmp_path / "bundle")
    assert Policy.load(tmp_path / "bundle").facts == own.policy.facts
    with pytest.raises(UsageError, match="--action-tokenizer is for policies whose folders lack it"):
        export_bundle(
            ExportRequest(str(checkpoint("paligemma")), action_tokenizer=str(tmp_path / "fast")), tmp_path / "other"
        )
