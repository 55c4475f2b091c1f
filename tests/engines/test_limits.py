"""Limits of engines, and optimisation profiles that hold every shape of a request or of a policy's chunk."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import Pipeline, Policy
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.engines_manifest import Limits, Range, enforced_limits, read_engines
from sinkprune.contract.errors import BundleError, PromptError, UsageError
from sinkprune.contract.manifest import Manifest
from sinkprune.engines.profiles import optimisation_profiles, resolve_limits
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.dialects import DIALECTS
from sinkprune.export.source import ExportRequest
from sinkprune.policies.chunk import check_prompt_length
from sinkprune.runtime.backends.kv_cache import ROOM, room_for
from support.programs.commands import assert_refused, run, succeed
from support.references import shapes_sent

LONG_PROMPT = "Which colour is the cup on the table, and what is in the picture behind it?"
METHODS = ("sinkpruner", "sinkpruner-no-sanitizer", "fastervlm", "tops", "sparsevlm")


@pytest.fixture(scope="module")
def manifest(bundle: Callable[..., Path]) -> Manifest:
    """576 visual tokens, 1024 positions, six layers cut after 0, 1 and 3."""
    return read_bundle(bundle("mha-336")).manifest


def resolved(
    manifest: Manifest, prompt: int | None = None, new: int | None = None, images: int | None = None
) -> Limits:
    return resolve_limits(manifest, prompt_tokens=prompt, new_tokens=new, images=images)


def test_limits_default_to_what_the_model_has_room_for(manifest: Manifest) -> None:
    assert resolved(manifest) == Limits(224, 224, 1)
    assert resolved(manifest, prompt=400) == Limits(400, 48, 1)
    assert resolved(manifest, new=400) == Limits(48, 400, 1)
    assert resolved(manifest, 30, 20) == Limits(30, 20, 1)
    roomy = replace(manifest, language_model=replace(manifest.language_model, max_positions=4096))
    assert resolved(roomy) == Limits(512, 512, 1)
    assert resolved(replace(roomy, max_images=3), images=2).images == 2
    for prompt, new in ((448, None), (200, 249)):
        said = rf"{prompt} tokens of prompt .* 576 visual tokens and {new or 1} new .* 1024 positions.* 448 together"
        with pytest.raises(UsageError, match=said):
            resolved(manifest, prompt, new)


def test_an_unknown_dimension_is_refused(manifest: Manifest) -> None:
    head = manifest.graphs["head"]
    changed = replace(head, inputs=(replace(head.inputs[0], shape=(1, "Q", 64)),))
    strange = replace(manifest, graphs={**manifest.graphs, "head": changed})
    with pytest.raises(
        BundleError, match=r"'head': input 'hidden' has the dynamic dimension 'Q', expected one of G,"
    ):
        optimisation_profiles(strange, Limits(100, 50, 1))


def test_every_shape_the_chain_sends_lies_in_an_optimisation_profile(
    checkpoint: Callable[[str], Path], photo: Image.Image, tmp_path: Path
) -> None:
    """The longest request equals the limits: an optimisation profile one token shorter would be too short."""
    export_bundle(ExportRequest(str(checkpoint("gqa-112")), methods=METHODS), tmp_path / "bundle")
    bundle = read_bundle(tmp_path / "bundle")
    sent = shapes_sent.ShapesSent()
    pipeline = Pipeline.load(bundle, wrap=sent)
    options: dict[str, Any] = {"max_new_tokens": shapes_sent.NEW_TOKENS, "min_new_tokens": shapes_sent.NEW_TOKENS}
    longest = pipeline.generate(photo, LONG_PROMPT, **options).prompt_tokens
    for method, plans in bundle.manifest.plans.items():
        for budget in plans:
            for prompt in ("?", LONG_PROMPT):
                pipeline.generate(photo, prompt, method=method, budget=budget, **options)

    limits = Limits(longest, shapes_sent.NEW_TOKENS, 1)
    assert not sent.outside_optimisation_profiles(bundle, limits)
    tight, of_graph = optimisation_profiles(bundle.manifest, limits)["decoder_0"], sent.by_graph["decoder_0"]
    assert max(shapes["hidden"][1] for shapes in of_graph) == tight["prefill"]["hidden"].max[1]
    assert max(shapes["past_key_0"][2] for shapes in of_graph) == tight["decode"]["past_key_0"].max[2]


BUDGETS = ("prune-77.8", "prune-88.9+raster", "prune-88.9+bars")
INSTRUCTION = "pick up the red cup"


@pytest.fixture(scope="module")
def source(bundle: Callable[..., Path]) -> Callable[..., Path]:
    """A policy of three cameras with 64 tokens each, in a dialect."""
    return lambda dialect="opset24": bundle("pi0", budgets=BUDGETS, max_images=3, dialect=dialect)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_shape_of_a_policy_lies_in_an_optimisation_profile(
    dialect: str, source: Callable[..., Path], photo: Image.Image
) -> None:
    """The longest instruction equals the limit: an optimisation profile one token shorter would be too short."""
    opened, longest = read_bundle(source(dialect)), "put the cup next to the plate. then wait."
    policy = Policy.load(opened)
    state = list(policy.facts.state_mean)
    most = policy.act([photo] * 3, longest, state, steps=1).prompt_tokens
    chunks = [([photo] * 3, longest), ([photo, None, photo], INSTRUCTION), ([None, None, photo], "a")]
    # Most of such a square is bars.
    chunks.append(([photo.resize((160, 60))] * 3, INSTRUCTION))
    limits = resolved(opened.manifest, most)
    assert not shapes_sent.policy_shapes_outside_optimisation_profiles(opened, limits, chunks)
    tighter = resolved(opened.manifest, most - 1)
    outside = shapes_sent.policy_shapes_outside_optimisation_profiles(opened, tighter, chunks[:1])
    assert {graph for graph, _ in outside} >= {"decoder_0", "decoder_2"}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_expert_reads_caches_of_every_room(dialect: str, source: Callable[..., Path]) -> None:
    """In place a segment has one room, that of the longest prompt; smaller ones are those of the gate's recording."""
    manifest = read_bundle(source(dialect)).manifest
    profiles = optimisation_profiles(manifest, resolved(manifest, 40))
    expert, most = profiles["expert"]["prefill"], room_for(3 * 64 + 40)
    for segment, layers in enumerate(manifest.segments):
        counted = room_for(profiles[f"decoder_{segment}"]["prefill"]["hidden"].opt[1])
        usual = most if manifest.cache == "in-place" else counted
        rooms = Range(*((1, 1, room, 16) for room in (ROOM, usual, most)))
        assert all(expert[f"past_{kind}_{layer}"] == rooms for kind in ("key", "value") for layer in layers)


def test_the_limits_of_a_policy(source: Callable[..., Path], bundle: Callable[..., Path]) -> None:
    manifest = read_bundle(source()).manifest
    assert resolved(manifest) == resolved(manifest, images=3) == Limits(64, 0, 3)
    assert resolved(manifest, 400) == Limits(400, 0, 3)
    # Errors print the limits as options of the command that rebuilds the engines.
    assert enforced_limits(resolved(manifest), "tensorrt-rtx", ()) == {"prompt_tokens": 64, "images": 3}
    with pytest.raises(UsageError, match=r"--max-new-tokens is 8, and a robot policy generates no tokens\. Leave"):
        resolved(manifest, new=8)
    with pytest.raises(UsageError, match=r"--max-images is 2, and this policy acts on 3 cameras.* --max-images 2\."):
        resolved(manifest, images=2)
    with pytest.raises(UsageError, match="exceed the model's 8192 positions"):
        resolved(manifest, 8001)
    assert manifest.policy is not None
    named = replace(manifest, policy=replace(manifest.policy, cameras=("a", "b", "c"), most_prompt_tokens=20))
    # An export of named cameras takes no other number.
    with pytest.raises(UsageError, match=r"acts on 3 cameras\. Leave the option out\.$"):
        resolved(named, images=2)
    # Engines for longer prompts would not help.
    with pytest.raises(PromptError, match=r"52 text tokens .* more than the 20 of the policy's training"):
        check_prompt_length(named, Limits(20, 0, 3), 52, 100)
    # pi0.5 has the state in its prompt: it was trained with 200 tokens, which its checkpoint does not say.
    manifest = read_bundle(bundle("pi0.5", budgets=BUDGETS, max_images=3)).manifest
    assert manifest.policy is not None and manifest.policy.most_prompt_tokens is None
    assert resolved(manifest).prompt_tokens == 200


def test_engines_act_and_refuse_a_longer_instruction(
    source: Callable[..., Path], photo: Image.Image, tmp_path: Path
) -> None:
    output = tmp_path / "engines"
    succeed("sinkprune-build", source(), "-o", output, "--target", "onnxruntime", "--max-prompt", 24)
    assert read_engines(output).manifest.enforced_limits == {"prompt_tokens": 24}
    engines, graphs = Policy.load(output), Policy.load(source())
    state = list(engines.facts.state_mean)
    for budget in (UNPRUNED, *BUDGETS):
        chunks = [each.act([photo] * 3, INSTRUCTION, state, seed=1, budget=budget) for each in (engines, graphs)]
        assert abs(chunks[0].actions - chunks[1].actions).max() < 1e-4
    with pytest.raises(PromptError, match=r"more than the 24 the engines were built for.* --max-prompt 31 added to"):
        engines.act([photo] * 3, "put the cup next to the dish.", state)


def test_a_limit_below_the_shortest_prompt_is_refused(source: Callable[..., Path], tmp_path: Path) -> None:
    command = ("sinkprune-build", source(), "-o", tmp_path / "engines", "--target", "onnxruntime", "--max-prompt")
    refused = run(*command, 2)
    assert_refused(refused, "--max-prompt is 2, and the shortest instruction has ")
    (least,) = re.findall(r"Give (\d+) or more\.", refused.stderr)
    succeed(*command, least)
    policy = Policy.load(tmp_path / "engines")
    chunk = policy.act([Image.new("RGB", (90, 90)), None, None], "a", list(policy.facts.state_mean), steps=1)
    assert chunk.prompt_tokens == int(least)
