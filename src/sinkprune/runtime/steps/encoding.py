"""The first steps on the device: pixels to visual tokens, and kept tokens to embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sinkprune.contract.errors import NumericsError
from sinkprune.contract.plans import Plan
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Backend, Tensor
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.steps.chain import Chain


@dataclass(frozen=True)
class EncodedPicture:
    """A picture as the LLM receives it: n0 kept tokens of each of G' groups of N' tokens."""

    embeddings: Tensor
    """[G',n0,d] float on the device, in the decoder's width."""
    kept_index: Array
    """[G',n0] int64: the token of each row, numbered within its group."""
    norms: Array
    """[G',N'] fp32: the norm of each token in the vision tower."""
    salience: Array
    """[G',N'] fp32: the attention each token receives in the vision tower."""
    deepstack: Tensor | None = None
    """[G',n0,E] float on the device: what the decoder's first layers add to each row, for models with DeepStack."""

    @property
    def source_tokens(self) -> Array:
        """[G'*n0] int64: the token of each row, numbered through all groups."""
        groups, tokens = self.norms.shape
        return (self.kept_index + tokens * np.arange(groups)[:, None]).ravel()


@dataclass(frozen=True)
class TowerOutput:
    """The outputs of the vision tower for a picture of G groups of N tokens."""

    tokens: Tensor
    """[G,N,D] float on the device."""
    device_norms: Tensor
    """[G,N] fp32 on the device."""
    device_salience: Tensor
    norms: Array
    """[G,N] fp32 on the host."""
    salience: Array
    deepstack: Tensor | None = None
    """[G,N,E] float on the device: what the decoder's first layers add to each token, for models with DeepStack."""


def run_tower(chain: Chain, inputs: Mapping[str, Array], clock: Stopwatch) -> TowerOutput:
    """Run the vision tower on the `inputs` of the graph `vision`, and wait for it.

    Raises `NumericsError` if tokens, norms or salience are not finite, before tokens are selected by them.
    """
    backend = chain.backend
    with clock.measure("vision"):
        features = chain.vision({name: backend.tensor(array) for name, array in inputs.items()})
    tokens, norms, salience = features["tokens"], features["norms"], features["salience"]
    # Waits for the tower once: norms, salience and tokens are complete together.
    host_norms, host_salience = backend.numpy(norms), backend.numpy(salience)
    tower = TowerOutput(tokens, norms, salience, host_norms, host_salience, features.get("deepstack"))
    _check_finite("norms or salience", tower.norms, tower.salience)
    if chain.projector is None:
        # Layers after the norms may still overflow. With a projector, the norms are those of the tokens.
        _check_finite("tokens", backend.numpy(tokens))
    return tower


def of_each_group(backend: Backend, tower: TowerOutput) -> list[TowerOutput]:
    """Return the `tower`'s output on G pictures of one group each, by picture."""
    groups, count = tower.norms.shape
    if groups == 1:
        return [tower]

    def own(group: int) -> TowerOutput:
        rows, one = np.arange(group * count, (group + 1) * count), slice(group, group + 1)
        norms, salience = tower.norms[one], tower.salience[one]
        deepstack = None if tower.deepstack is None else backend.join([tower.deepstack], rows)
        tokens = backend.join([tower.tokens], rows)
        return TowerOutput(tokens, backend.tensor(norms), backend.tensor(salience), norms, salience, deepstack)

    return [own(group) for group in range(groups)]


def encode(
    chain: Chain, plan: Plan | None, tower: TowerOutput, clock: Stopwatch, question: Tensor | None = None
) -> EncodedPicture:
    """Run the plan's sanitizer, if any, and the projector, if any, on the output of the `tower`.

    `question` [T,d] are its words as the decoder receives them, for sanitizers that read it.
    """
    if plan is None or plan.sanitizer is None:
        every = np.broadcast_to(np.arange(tower.norms.shape[1]), tower.norms.shape)
        return _projected(chain, tower, tower.tokens, tower.deepstack, every, clock)
    sanitizer = chain.plan_engine(plan.sanitizer)
    inputs = {"tokens": tower.tokens, "norms": tower.device_norms, "salience": tower.device_salience}
    if tower.deepstack is not None:
        inputs["deepstack"] = tower.deepstack
    if question is not None:
        inputs |= {"question": question, "embeddings": _in_llm(chain, tower.tokens, clock)}
    with clock.measure("sanitizer"):
        kept = sanitizer(inputs)
    index = chain.backend.numpy(kept["kept_index"])
    return _projected(chain, tower, kept["kept_tokens"], kept.get("kept_deepstack"), index, clock)


def _projected(
    chain: Chain, tower: TowerOutput, tokens: Tensor, deepstack: Tensor | None, kept_index: Array, clock: Stopwatch
) -> EncodedPicture:
    """Return the `tokens` with these `kept_index` [G',n0] as the LLM receives them."""
    if deepstack is not None:
        _check_finite("DeepStack features", chain.backend.numpy(deepstack))
    embeddings = _in_llm(chain, tokens, clock)
    # Frames that the sanitizer treats as one are one group from here on.
    groups = len(kept_index)
    norms, salience = (values.reshape(groups, -1) for values in (tower.norms, tower.salience))
    return EncodedPicture(embeddings, kept_index, norms, salience, deepstack)


def _in_llm(chain: Chain, tokens: Tensor, clock: Stopwatch) -> Tensor:
    """Return the tower's `tokens` as the LLM receives them."""
    if chain.projector is None:
        return tokens
    with clock.measure("projector"):
        return chain.projector({"tokens": tokens})["embeddings"]


def _check_finite(what: str, *arrays: Array) -> None:
    if not all(np.isfinite(array).all() for array in arrays):
        raise NumericsError(
            f"the vision tower gave {what} that are not finite, so neither a selection nor an answer is reliable. If "
            "the bundle is fp16, its values may exceed that type; export it with --precision fp32. openvino-gpu "
            "computes in fp16 unless --compute is fp32. If neither is so, the checkpoint's weights or its image "
            "processor's settings are damaged."
        )
