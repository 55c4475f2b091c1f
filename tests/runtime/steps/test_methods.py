"""Every method runs in the chain: it answers, keeps what its plan says, and is drawn and profiled like SinkPruner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

from sinkprune import Pipeline, Session
from sinkprune.contract.budgets import scaled_layers
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BudgetError
from sinkprune.export.bundle_writer import Unreachable, export_bundle
from sinkprune.export.methods import METHODS as ALL_METHODS
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.overlay import AVERAGING, token_fates
from support.programs.commands import assert_refused, run
from support.references.kept_tokens import kept_of
from support.references.masking import assert_equals_masked, embedded, masked_forward
from support.references.pruned_prompts import prompt_rows
from support.references.reference_methods import (
    CANNOT_REACH_ALL,
    IN_LLM,
    ON_A_GRID,
    READ_THE_QUESTION,
    TWO_STAGES,
    asking_rows,
)
from support.references.steps import ask, tower_output

Models, Folders = Callable[[str], Any], Callable[[str], Path]
PROMPT = "Describe the image, please: which colour is the cup?"
LAYERS, TOKENS = 8, 64
BUDGETS = ("retain-192", "retain-192+compact", "retain-32")
METHODS = tuple(ALL_METHODS)


LEFT_OUT: list[Unreachable] = []
"""What the export of `root` left out."""


@pytest.fixture(scope="module")
def root(checkpoint: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of every method."""
    output = tmp_path_factory.mktemp("methods") / "bundle"
    export_bundle(ExportRequest(str(checkpoint("gqa-112")), BUDGETS, METHODS), output, left_out=LEFT_OUT.append)
    return output


@pytest.fixture(scope="module")
def pipe(root: Path) -> Pipeline:
    return Pipeline.load(root)


def test_one_bundle_is_cut_at_the_union_of_all_layers(root: Path) -> None:
    manifest = read_bundle(root).manifest
    assert manifest.cut_after == (1, 2, 3, 4, 6)
    selects = {method: tuple(map(int, plans["retain-192"].select_after)) for method, plans in manifest.plans.items()}
    inside = {method: scaled_layers(own.cuts, LAYERS) for method, own in {**IN_LLM, **TWO_STAGES}.items()}
    assert (inside["tops"], inside["vscan"]) == ((3, 6), (4,))
    before = dict.fromkeys((*ON_A_GRID, *READ_THE_QUESTION, "random", "sinkpruner-no-text-pruner"), ())
    assert selects == dict.fromkeys(METHODS, (1,)) | {"sinkpruner-paper": (1, 2, 4)} | inside | before
    for path in (root / "graphs").glob("*/retain-192/*.onnx"):
        assert path.stat().st_size < 40_000


def test_what_a_method_cannot_reach_is_left_out_and_reported(root: Path) -> None:
    missing = {(plan.method, plan.budget) for plan in LEFT_OUT}
    assert missing == {(method, "retain-32") for method in CANNOT_REACH_ALL}
    manifest = read_bundle(root).manifest
    for method in METHODS:
        held = [name for name in BUDGETS if (method, name) not in missing]
        assert list(manifest.plans[method]) == held
    with pytest.raises(BudgetError, match=r"no budget 'retain-32' for method 'fastv'; .*It holds: none, retain-192"):
        manifest.plan("fastv", "retain-32")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_the_counts_of_its_plan(method: str, pipe: Pipeline, photo: Image.Image) -> None:
    manifest = pipe.bundle.manifest
    wanted = sum(ask(pipe, photo, "retain-192", 1, PROMPT)[0].tokens_per_layer) / LAYERS
    answer, _ = ask(pipe, photo, "retain-192", 4, PROMPT, method)
    counts = manifest.plans[method]["retain-192"].counts
    assert answer.kept.index.shape == (1, counts.kept)
    assert sum(answer.tokens_per_layer) / LAYERS == pytest.approx(wanted, abs=0.5)
    assert answer.tokens_per_layer[0] == counts.kept
    assert answer.tokens_per_layer[-1] == min(counts.kept, *counts.stages, counts.kept)
    fates = token_fates(answer.kept)
    assert fates.kept.sum() == counts.kept - counts.sink
    assert fates.survived.sum() in (answer.tokens_per_layer[-1], answer.tokens_per_layer[-1] - counts.sink)


@pytest.mark.parametrize("method", METHODS)
def test_the_methods_that_average_are_named(method: str, root: Path, pipe: Pipeline, photo: Image.Image) -> None:
    """A kept row is a token as the tower returned it, unless the method averages others into it."""
    path = root / "graphs" / method / "retain-192" / "sanitizer.onnx"
    if not path.exists():
        assert method not in AVERAGING
        return
    session = onnxruntime.InferenceSession(path)
    rng, (tokens, norms, salience) = np.random.default_rng(0), tower_output(pipe, photo)
    given = {"tokens": tokens, "norms": norms, "salience": salience}
    width = pipe.bundle.manifest.language_model.hidden_size
    given |= {
        "embeddings": rng.normal(size=(1, TOKENS, width)).astype(np.float32),
        "question": rng.normal(size=(3, width)).astype(np.float32),
    }
    outputs = session.run(None, {each.name: given[each.name] for each in session.get_inputs()})
    found = dict(zip([each.name for each in session.get_outputs()], outputs, strict=True))
    index = next(array for name, array in found.items() if array.dtype == np.int64)
    sinks = pipe.bundle.manifest.plans[method]["retain-192"].counts.sink
    unchanged = np.array_equal(found["kept_tokens"][:, sinks:], tokens[:, index[0, sinks:]])
    assert unchanged == (method not in AVERAGING)


@pytest.fixture(scope="module")
def reference(pipe: Pipeline, model: Models, photo: Image.Image) -> Callable[[str, str, str], Any]:
    """The tokens of the photo that a reference keeps, and their sources, by method, budget and question."""
    features, torch_model = [array[0] for array in tower_output(pipe, photo)], model("gqa-112")
    pixels = torch.from_numpy(pipe.family.inputs(photo)["pixel_values"])
    with torch.no_grad():
        # As the decoder of transformers receives them.
        rows = torch_model.get_image_features(pixels).pooler_output[0].numpy()

    def kept(method: str, budget: str, question: str) -> tuple[Any, list[int]]:
        plan = pipe.bundle.manifest.plans[method][budget]
        if plan.sanitizer is None:
            return features[0], [*range(TOKENS)]
        words = embedded(torch_model, pipe.prompts.tokenizer.encode(question, add_special_tokens=False).ids)
        return kept_of(method, plan.counts, features, words, embeddings=rows)

    return kept


@pytest.mark.parametrize("budget", ["retain-192", "retain-192+compact"])
@pytest.mark.parametrize("method", [*IN_LLM, "sinkpruner-paper"])
def test_dropping_inside_the_llm_equals_masking(
    method: str, budget: str, reference: Any, pipe: Pipeline, model: Models, photo: Image.Image
) -> None:
    torch_model, plan = model("gqa-112"), pipe.bundle.manifest.plans[method][budget]
    kept, index = reference(method, budget, PROMPT)
    sequence = prompt_rows(torch_model, pipe, photo, PROMPT, kept, [index], None)
    stages = dict(zip(map(int, plan.select_after), plan.counts.stages, strict=True))

    answer, logits = ask(pipe, photo, budget, 5, PROMPT, method)
    later = embedded(torch_model, answer.token_ids[:-1])
    masked = masked_forward(torch_model, sequence, budget, stages, later, partial(asking_rows, method))
    assert_equals_masked(answer, logits, sequence, masked, pipe.bundle.manifest.tokens.stop)


@pytest.mark.parametrize("method", ["sinkpruner-text", *READ_THE_QUESTION])
def test_the_sanitizer_reads_the_question(method: str, reference: Any, pipe: Pipeline, photo: Image.Image) -> None:
    """Kept are the reference's tokens, for the words of the last turn of the user, and of no other text."""
    counts = pipe.bundle.manifest.plans[method]["retain-192"].counts

    def expected(words: str) -> list[int]:
        return reference(method, "retain-192", words)[1]

    options = {"method": method, "budget": "retain-192", "max_new_tokens": 1}
    asked = ("Which colour is the cup?", "zzz")
    assert expected(asked[0]) != expected(asked[1])
    turns = [("user", asked[0]), ("assistant", "Red.")]
    for answering in (pipe, session := Session(pipe)):
        for words, more in ((asked[0], {}), (asked[1], {}), (asked[1], {"history": turns, "system": "Be brief."})):
            assert answering.generate(photo, words, **options, **more).kept.index.tolist() == [expected(words)]
    # The session keeps the tower's output, and shares rows between equal questions only.
    again = session.generate(photo, asked[1], **options)
    other = session.generate(photo, asked[0] + "?", **options)
    assert (again.reused_towers, other.reused_towers) == (1, 1)
    assert again.reused_rows > counts.kept > other.reused_rows


def test_an_export_of_a_method_without_a_plan_is_refused(checkpoint: Folders, tmp_path: Path) -> None:
    request = (checkpoint("gqa-112"), "-o", tmp_path / "out", "--methods", "uniform,fastv", "--budgets", "retain-32")
    assert_refused(run("sinkprune-export", *request), "'fastv' reaches none", "retain-32", "all 64 visual tokens")
    assert not list(tmp_path.iterdir())
