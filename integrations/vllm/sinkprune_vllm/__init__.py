"""SinkPruner's sanitizer as a plugin of vLLM: a picture sends few of its tokens into the LLM.

vLLM calls `register` in each of its processes. A model is pruned if its configuration has the option
`sinkprune` (`sinkprune_vllm.option`), and is vLLM's own otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

TESTED = "0.32"
"""The minor version of vLLM whose classes this package replaces."""


def register() -> None:
    """Register the models that prune, and the check of the option. vLLM may call this more than once.

    Raises `RuntimeError` for another version of vLLM.
    """
    # Builds for CPUs may have another package's name.
    import vllm

    found = vllm.__version__
    if found.split("+")[0].split(".")[:2] != TESTED.split("."):
        raise RuntimeError(
            f"sinkprune-vllm works with vLLM {TESTED}, found {found}. Run: pip install 'vllm=={TESTED}.*', or to run "
            "this vLLM unpruned: pip uninstall sinkprune-vllm"
        )
    from vllm.config import VllmConfig
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms import current_platform

    from sinkprune_vllm.option import FAMILIES, check

    for architecture, family in FAMILIES.items():
        ModelRegistry.register_model(architecture, family.model)

    # vLLM has no hook for the check of a configuration of any architecture.
    _follow(VllmConfig, "try_verify_and_update_config", check)
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        _follow(CPUModelRunner, "load_model", _ask_for_positions)


def _follow(owner: type, name: str, then: Callable[[Any], None]) -> None:
    """Let a method call `then` at its end, once however often this is called."""
    method = getattr(owner, name)
    if not hasattr(method, "followed_by"):

        @wraps(method)
        def followed(self: Any, *given: Any, **named: Any) -> None:
            method(self, *given, **named)
            then(self)

        followed.followed_by = then
        setattr(owner, name, followed)


def _ask_for_positions(runner: Any) -> None:
    # vLLM's runner for CPUs leaves out this line of the one for GPUs.
    runner.is_multimodal_pruning_enabled = runner.model_config.multimodal_config.is_multimodal_pruning_enabled()
