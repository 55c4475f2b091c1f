"""The plugins work in the real binding classes of TensorRT-RTX, and enqueue the right launches.

Fakes replace what needs a GPU or full TensorRT. `FakeRunner` takes launches in place of a GPU. `FakeDimsExprs` and
`FakeExprBuilder` are shape expressions, which only a builder with plugins can make. TensorRT-RTX's parser calls our
creator, and then aborts the process, because its network takes no plugins.
"""

from __future__ import annotations

import gc
import platform
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

if platform.machine() != "x86_64":
    pytest.skip("tensorrt-rtx has wheels for x86-64 only", allow_module_level=True)

import tensorrt_rtx as trt

from sinkprune.contract.errors import BackendError, EnginesError
from sinkprune.engines.plugins import plugin_v3 as registry
from sinkprune.engines.plugins.descriptions import NAMESPACE, PLUGINS, VERSION
from sinkprune.engines.plugins.launches import (
    Launch,
    diversity_launches,
    diversity_workspace,
    sha256,
    top_rho_launches,
)
from sinkprune.engines.plugins.plugin_v3 import creator

TOP_RHO, DIVERSITY_SELECT = PLUGINS
TYPES = trt.DataType
G, N, D, R, COUNT = 2, 37, 48, 5, 9


@dataclass
class FakeRunner:
    """Records launches in place of a GPU."""

    prepared: list[Launch] = field(default_factory=list)
    enqueued: list[tuple[Launch, int]] = field(default_factory=list)

    def prepare(self, launches: Sequence[Launch]) -> None:
        self.prepared.extend(launches)

    def run(self, launches: Sequence[Launch], stream: int) -> None:
        self.enqueued.extend((launch, stream) for launch in launches)


class FakeDimsExprs(list[Any]):
    """Shape expressions that are plain values."""

    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


class FakeExprBuilder:
    def constant(self, value: int) -> int:
        return value


class LibraryWithFakeDimensions:
    """TensorRT-RTX with other shape expressions."""

    DimsExprs = FakeDimsExprs

    def __getattr__(self, name: str) -> Any:
        return getattr(trt, name)


def fields(**values: int) -> list[Any]:
    """Return fields as the parser makes them from INT attributes; collections point into them."""
    int32 = trt.PluginFieldType.INT32
    return [trt.PluginField(name, np.array([value], np.int32), int32) for name, value in values.items()]


def make(description: Any, runner: FakeRunner | None = None, library: Any = trt, **values: int) -> Any:
    made, given = creator(library, description, runner or FakeRunner()), fields(**values)
    return made.create_plugin("node", trt.PluginFieldCollection(given), trt.TensorRTPhase.BUILD)


def described(dtype: Any, shape: Sequence[int], layout: Any = trt.TensorFormat.LINEAR) -> Any:
    found = trt.PluginTensorDesc()
    found.type, found.dims, found.format = dtype, trt.Dims(shape), layout
    return found


def dynamic(dtype: Any, shape: Sequence[int], layout: Any = trt.TensorFormat.LINEAR) -> Any:
    found = trt.DynamicPluginTensorDesc()
    found.desc = described(dtype, [-1, *shape[1:]], layout)
    found.min, found.opt, found.max = (trt.Dims([groups, *shape[1:]]) for groups in (1, 1, shape[0]))
    return found


def top_rho_io(tokens: Any = TYPES.HALF, desc: Any = described) -> tuple[list[Any], list[Any]]:
    return (
        [desc(TYPES.FLOAT, (G, N)), desc(tokens, (G, N, D))],
        [desc(tokens, (G, 1, D)), desc(TYPES.INT32, (G, N))],
    )


def diversity_io(tokens: Any = TYPES.HALF, desc: Any = described) -> tuple[list[Any], list[Any]]:
    return (
        [desc(tokens, (G, N, D)), desc(TYPES.INT32, (G, N)), desc(TYPES.INT64, (G, R))],
        [desc(TYPES.INT64, (G, COUNT))],
    )


@pytest.fixture
def clean_registry() -> Iterator[Any]:
    """Yield TensorRT-RTX's registry of plugins, and then remove the plugins of a test from it."""
    found = trt.get_plugin_registry()
    yield found
    for description in PLUGINS:
        left = found.get_creator(description.name, VERSION, NAMESPACE)
        if left is not None:
            found.deregister_creator(left)


@pytest.mark.parametrize("description", PLUGINS, ids=lambda description: description.name)
def test_the_bindings_find_every_method_they_call(description: Any) -> None:
    """pybind11 calls a method only if it is a Python method."""
    plugin = make(description, **dict.fromkeys(description.attributes, 16))
    methods = [
        *("clone", "get_capability_interface", "get_output_data_types", "get_output_shapes", "get_workspace_size"),
        *("supports_format_combination", "configure_plugin", "get_valid_tactics", "set_tactic", "on_shape_change"),
        *("enqueue", "attach_to_context", "get_fields_to_serialize"),
    ]
    assert all(type(getattr(plugin, method)).__name__ == "method" for method in methods)


@pytest.mark.parametrize(
    "values", [{}, {"count": 4}, {"rounds": 0}, {"rounds": 8, "count": -1}, {"rounds": 8, "per_mille": 10}]
)
def test_fields_that_do_not_fit_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(EnginesError, match=r"DiversitySelect of node 'node' was given .* expected rounds"):
        make(DIVERSITY_SELECT, **values)


@pytest.mark.parametrize("values", [{"rounds": 8}, {"rounds": 2, "count": COUNT}])
def test_what_is_serialised_makes_the_same_plugin_again(values: dict[str, int]) -> None:
    runner = FakeRunner()
    made, given = creator(trt, DIVERSITY_SELECT, runner), fields(**values)
    built = made.create_plugin("node", trt.PluginFieldCollection(given), trt.TensorRTPhase.BUILD)
    copy = built.clone().attach_to_context(None)
    del built
    gc.collect()
    stored = copy.get_fields_to_serialize()
    assert {stored[i].name: list(stored[i].data) for i in range(len(stored))} == {k: [v] for k, v in values.items()}
    assert copy is not copy.clone()
    assert type(copy.clone()) is type(copy)

    loaded = made.create_plugin("node", stored, trt.TensorRTPhase.RUNTIME)
    inputs, outputs = diversity_io()
    for plugin in (copy, loaded):
        plugin.enqueue(inputs, outputs, [64, 128, 192], [256], 320, 7)
    half = len(runner.enqueued) // 2
    assert half > 0
    assert runner.enqueued[:half] == runner.enqueued[half:]


@pytest.mark.parametrize("tokens", [TYPES.FLOAT, TYPES.HALF, TYPES.BF16])
def test_outputs_follow_the_type_of_the_tokens(tokens: Any) -> None:
    assert make(TOP_RHO, per_mille=10).get_output_data_types([TYPES.FLOAT, tokens]) == [tokens, TYPES.INT32]
    assert make(DIVERSITY_SELECT, rounds=8).get_output_data_types([tokens, TYPES.INT32, TYPES.INT64]) == [TYPES.INT64]


def test_shapes() -> None:
    library, builder = LibraryWithFakeDimensions(), FakeExprBuilder()
    plugin = make(TOP_RHO, library=library, per_mille=10)
    assert plugin.get_output_shapes([["g", "n"], ["g", "n", "d"]], [], builder) == [["g", 1, "d"], ["g", "n"]]

    inputs = [["g", "n", "d"], ["g", "n"], ["g", "r"]]
    constant = make(DIVERSITY_SELECT, library=library, rounds=8, count=COUNT)
    assert constant.get_output_shapes(inputs, [], builder) == [["g", COUNT]]
    computed = make(DIVERSITY_SELECT, library=library, rounds=8)
    assert computed.get_output_shapes(inputs, [["value of count"]], builder) == [["g", "value of count"]]


def accepted(plugin: Any, inputs: list[Any], outputs: list[Any]) -> list[bool]:
    io = [*inputs, *outputs]
    return [plugin.supports_format_combination(place, io, len(inputs)) for place in range(len(io))]


@pytest.mark.parametrize("tokens", [TYPES.FLOAT, TYPES.HALF, TYPES.BF16])
def test_formats_that_are_taken(tokens: Any) -> None:
    assert all(accepted(make(TOP_RHO, per_mille=10), *top_rho_io(tokens, dynamic)))
    inputs, outputs = diversity_io(tokens, dynamic)
    plugin = make(DIVERSITY_SELECT, rounds=8)
    assert all(accepted(plugin, inputs, outputs))
    # A shape input would follow the inputs.
    assert all(accepted(plugin, [*inputs, dynamic(TYPES.INT64, (1,))], outputs))


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (0, dynamic(TYPES.INT8, (G, N, D))),
        (0, dynamic(TYPES.HALF, (G, N, D), trt.TensorFormat.CHW2)),
        (1, dynamic(TYPES.BOOL, (G, N))),
        (1, dynamic(TYPES.INT64, (G, N))),
        (2, dynamic(TYPES.INT32, (G, R))),
        (3, dynamic(TYPES.INT32, (G, COUNT))),
        (3, dynamic(TYPES.INT64, (G, COUNT), trt.TensorFormat.CHW2)),
    ],
)
def test_formats_that_are_refused(place: int, wrong: Any) -> None:
    inputs, outputs = diversity_io(desc=dynamic)
    io = [*inputs, *outputs]
    io[place] = wrong
    assert not accepted(make(DIVERSITY_SELECT, rounds=8), io[:3], io[3:])[place]


def test_workspace_is_for_the_largest_shapes() -> None:
    assert make(TOP_RHO, per_mille=10).get_workspace_size(*top_rho_io(desc=dynamic)) == 0
    plugin = make(DIVERSITY_SELECT, rounds=8)
    assert plugin.get_workspace_size(*diversity_io(desc=dynamic)) == diversity_workspace(G, N) > 0


@pytest.mark.parametrize(("per_mille", "count"), [(10, 1), (28, 2), (1000, N)])
def test_top_rho_is_enqueued_on_the_stream_it_is_given(per_mille: int, count: int) -> None:
    runner = FakeRunner()
    plugin = make(TOP_RHO, runner, per_mille=per_mille)
    inputs, outputs = top_rho_io(TYPES.BF16)
    plugin.on_shape_change(inputs, outputs)
    plugin.enqueue(inputs, outputs, [1 << 40, 2 << 40], [3 << 40, 4 << 40], 0, 99)
    addresses = {"norms": 1 << 40, "tokens": 2 << 40, "sink": 3 << 40, "outlier": 4 << 40}
    expected = top_rho_launches(addresses, {"G": G, "N": N, "D": D, "count": count}, "bfloat16")
    assert runner.enqueued == [(launch, 99) for launch in expected]
    assert [(launch.kernel, launch.dtype) for launch in runner.prepared] == [("top_rho", "bfloat16")]


@pytest.mark.parametrize("values", [{"rounds": 2}, {"rounds": 2, "count": COUNT}])
def test_diversity_select_is_enqueued_phase_by_phase(values: dict[str, int]) -> None:
    runner = FakeRunner()
    plugin = make(DIVERSITY_SELECT, runner, **values)
    inputs, outputs = diversity_io(TYPES.FLOAT)
    plugin.on_shape_change(inputs, outputs)
    plugin.enqueue(inputs, outputs, [1 << 40, 2 << 40, 3 << 40], [4 << 40], 5 << 40, 99)
    names = ("tokens", "candidate", "reserved", "chosen", "workspace")
    addresses = {name: place << 40 for place, name in enumerate(names, 1)}
    sizes = {"G": G, "N": N, "D": D, "R": R, "count": COUNT, "rounds": 2}
    expected = diversity_launches(addresses, sizes, "float32")
    assert len(expected) == 5
    assert runner.enqueued == [(launch, 99) for launch in expected]
    assert {launch.kernel for launch in runner.prepared} == {launch.kernel for launch in expected}


def test_registering_keeps_creators_alive_and_returns_sums_of_kernels(clean_registry: Any) -> None:
    expected = {"TopRho": sha256("TopRho"), "DiversitySelect": sha256("DiversitySelect")}
    assert registry.register(trt) == expected
    alive = weakref.ref(clean_registry.get_creator("TopRho", VERSION, NAMESPACE))
    gc.collect()
    assert alive() is not None
    assert registry.register(trt) == expected
    assert clean_registry.get_creator("TopRho", VERSION, NAMESPACE) is alive()
    assert clean_registry.get_creator("TopRho", VERSION, "") is None


def test_the_runtime_finds_the_plugins_where_they_are_installed() -> None:
    from importlib.metadata import entry_points

    (found,) = entry_points(group="sinkprune.tensorrt_plugins")
    assert found.load() is registry.register


class FakeRefusingLibrary:
    """TensorRT-RTX with a registry that rejects creators."""

    __name__, __version__ = "tensorrt", "10.3.0"

    def __getattr__(self, name: str) -> Any:
        return getattr(trt, name)

    def get_plugin_registry(self) -> Any:
        return self

    def get_creator(self, name: str, version: str, namespace: str) -> None:
        return None

    def register_creator(self, made: Any, namespace: str) -> bool:
        return False


def test_a_library_that_refuses_a_creator_is_named() -> None:
    with pytest.raises(BackendError, match=r"tensorrt 10\.3\.0 does not register the plugin TopRho"):
        registry.register(FakeRefusingLibrary())
