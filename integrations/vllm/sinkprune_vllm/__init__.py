"""SinkPruner's sanitizer as a plugin of vLLM: a picture sends few of its tokens into the LLM.

vLLM calls `register` in each of its processes. A model is pruned if its configuration has the option
`sinkprune` (`sinkprune_vllm.option`), and is vLLM's own otherwise.
"""

from __future__ import annotations

from functools import wraps

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

    from sinkprune_vllm.option import FAMILIES, check

    for architecture, family in FAMILIES.items():
        ModelRegistry.register_model(architecture, family.model)

    # vLLM has no hook for the check of a configuration of any architecture.
    update = VllmConfig.try_verify_and_update_config
    if not hasattr(update, "__wrapped__"):

        @wraps(update)
        def checked(self: VllmConfig) -> None:
            update(self)
            check(self)

        VllmConfig.try_verify_and_update_config = checked
