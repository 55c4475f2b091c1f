"""What vLLM asks of a model before it runs: the placeholders of a picture, and its key in the caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.multimodal import MULTIMODAL_REGISTRY

from sinkprune_vllm.option import budget_of

METHOD = "sinkpruner-no-text-pruner"


class PrunedProcessor:
    """Tells pictures of this budget from others in vLLM's caches."""

    def _get_mm_hashes(self, inputs: Any) -> Any:
        own = f"{METHOD}-{budget_of(self.info.get_hf_config())}"
        hashes = super()._get_mm_hashes(inputs)
        return {kind: [f"{found}-{own}" for found in of_kind] for kind, of_kind in hashes.items()}


def for_option(info: type, processor: type) -> Callable[[type], type]:
    """Make a model, its info and its processor vLLM's where a configuration has no option.

    Where it has one, info and processor are vLLM's with these classes in front.
    """

    def wrap(model: type) -> type:
        plain, factory = model.__bases__[-1], model._processor_factory

        def new(cls: type, *, vllm_config: Any, prefix: str = "") -> Any:
            if budget_of(vllm_config.model_config.hf_config) is None:
                return plain(vllm_config=vllm_config, prefix=prefix)
            return object.__new__(cls)

        def build_info(ctx: Any) -> Any:
            own = factory.info(ctx)
            return own if budget_of(ctx.model_config.hf_config) is None else _in_front(info, own, ctx)

        def build_processor(made: Any, dummy_inputs: Any) -> Any:
            own = factory.processor(made, dummy_inputs)
            return _in_front(processor, own, made, dummy_inputs) if isinstance(made, info) else own

        model.__new__ = new
        register = MULTIMODAL_REGISTRY.register_processor
        return register(build_processor, info=build_info, dummy_inputs=factory.dummy_inputs)(model)

    return wrap


def _in_front(mixin: type, own: Any, *given: Any) -> Any:
    return type(mixin.__name__, (mixin, type(own)), {})(*given)
