"""Optimisation profiles hold every shape of a request, and no request may exceed the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.engines_manifest import Limits
from sinkprune.contract.errors import BundleError, UsageError
from sinkprune.contract.manifest import Manifest
from sinkprune.engines.profiles import optimisation_profiles, resolve_limits
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.references.shapes_sent import NEW_TOKENS, ShapesSent

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


@pytest.mark.parametrize(
    ("prompt", "new", "images", "said"),
    [
        (None, None, 2, "exported for up to 1 in a prompt.* --max-images 2"),
        (448, None, None, "448 tokens of prompt .* 576 visual tokens and 1 new .* 1024 positions.* 448 together"),
        (200, 249, None, "200 tokens of prompt .* 249 new tokens .* 448 together"),
    ],
)
def test_wrong_limits_are_refused(
    manifest: Manifest, prompt: int | None, new: int | None, images: int | None, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        resolved(manifest, prompt, new, images)


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
    shapes_sent = ShapesSent()
    pipeline = Pipeline.load(bundle, wrap=shapes_sent)
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    longest = pipeline.generate(photo, LONG_PROMPT, **options).prompt_tokens
    for method, plans in bundle.manifest.plans.items():
        for budget in plans:
            for prompt in ("?", LONG_PROMPT):
                pipeline.generate(photo, prompt, method=method, budget=budget, **options)

    limits = Limits(longest, NEW_TOKENS, 1)
    assert not shapes_sent.outside_optimisation_profiles(bundle, limits)
    tight, sent = optimisation_profiles(bundle.manifest, limits)["decoder_0"], shapes_sent.by_graph["decoder_0"]
    assert max(shapes["hidden"][1] for shapes in sent) == tight["prefill"]["hidden"].max[1]
    assert max(shapes["past_key_0"][2] for shapes in sent) == tight["decode"]["past_key_0"].max[2]
