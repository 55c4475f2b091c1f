"""Registers the plugins with TensorRT, before engines are built and before engines with plugins are loaded.

`register` is the entry point `tensorrt` of the group `sinkprune.tensorrt_plugins`. The runtime does not import this
folder, and finds the installed entry point. TensorRT's registry keeps the creators alive (`keep_alive` in
`python/src/infer/pyPlugin.cpp`).
"""

from __future__ import annotations

from typing import Any

from sinkprune.contract.errors import BackendError
from sinkprune.engines.plugins.binaries import sha256, shipped_sms
from sinkprune.engines.plugins.descriptions import NAMESPACE, PLUGINS, VERSION
from sinkprune.engines.plugins.kernel_runner import KernelRunner
from sinkprune.engines.plugins.plugin_v3 import creator


def register(library: Any) -> dict[str, str]:
    """Register the `IPluginV3` creators with `library`, `tensorrt` or `tensorrt_rtx`; a second call changes nothing.

    Returns the sha256 of each plugin's kernels by plugin name, as in `engines.json`. Needs no GPU: kernels are loaded
    before they first run. Raises `BackendError` if the library rejects a creator.
    """
    registry, runner = library.get_plugin_registry(), KernelRunner()
    for plugin in PLUGINS:
        known = registry.get_creator(plugin.name, VERSION, NAMESPACE) is not None
        if not known and not registry.register_creator(creator(library, plugin, runner), NAMESPACE):
            raise BackendError(
                f"{library.__name__} {library.__version__} does not register the plugin {plugin.name} of "
                f"{NAMESPACE}. End the program that holds another one of this name, and start again."
            )
    return {plugin.name: sha256(plugin.name) for plugin in PLUGINS}


def register_for_build(library: Any, sm: int) -> dict[str, str] | None:
    """Register the plugins for a build with `library` for `sm`; None if no kernels are shipped for such a GPU.

    Returns the plugins that engines need when they are loaded, as `register` does, and raises what `register` raises.
    """
    return None if sm < min(shipped_sms()) else register(library)
