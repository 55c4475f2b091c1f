"""An ahead-of-time plugin has the launch of the plugin class, as one kernel.

`FakeTensorRTPlugin` replaces the module `tensorrt.plugin`, which TensorRT-RTX does not have. Its symbolic sizes are
plain integers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from sinkprune.contract.errors import EnginesError
from sinkprune.engines.plugins import ahead_of_time, registry
from sinkprune.engines.plugins.ahead_of_time import register_ahead_of_time
from sinkprune.engines.plugins.binaries import Binary
from sinkprune.engines.plugins.descriptions import PLUGINS
from sinkprune.engines.plugins.launches import diversity_launches, in_one_launch, top_rho_launches

TOP_RHO, DIVERSITY_SELECT = PLUGINS
SM = 87
G, N, D, R, COUNT = 2, 37, 48, 5, 9
TYPES = SimpleNamespace(FLOAT="FLOAT", HALF="HALF", BF16="BF16", INT32="INT32", INT64="INT64")


class FakeSize(int):
    """A symbolic size whose value is known."""

    is_constant = True

    def constant_value(self) -> int:
        return int(self)


class FakeDynamicSize(FakeSize):
    is_constant = False


class FakeTensorRTPlugin:
    """The part of `tensorrt.plugin` that our code calls; keeps the registered functions."""

    class TensorDesc:
        def __init__(self, shape_expr: Sequence[Any], dtype: str) -> None:
            self.shape_expr, self.dtype = shape_expr, dtype

    class KernelLaunchParams:
        grid_x = grid_y = grid_z = block_x = block_y = block_z = 1
        shared_mem = 0

    class SymIntExprs(list[Any]):
        from_tuple = list

    SymInt32 = int
    from_shape_expr = TensorDesc

    def __init__(self) -> None:
        self.op = SimpleNamespace(sinkprune_ahead_of_time=SimpleNamespace())
        self.registered: dict[str, Callable[..., Any]] = {}
        self.compiled: dict[str, Callable[..., Any]] = {}

    def cdiv(self, first: int, second: int) -> int:
        return -(-first // second)

    def max(self, first: int, second: int) -> int:
        return max(first, second)

    def register(self, identity: str) -> Callable[..., Any]:
        setattr(self.op.sinkprune_ahead_of_time, identity.split("::")[1], identity)
        return lambda function: self.registered.setdefault(identity, function)

    def aot_impl(self, identity: str) -> Callable[..., Any]:
        return lambda function: self.compiled.setdefault(identity, function)


LIBRARY = SimpleNamespace(__name__="tensorrt", __version__="10.9.0", DataType=TYPES)


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRTPlugin:
    def ptx(kernel: str, dtype: str, sm: int) -> Binary:
        assert sm == SM
        return Binary(image=f"{kernel} {dtype}".encode(), entry="entry", threads=128, shared_bytes=1000)

    monkeypatch.setattr(ahead_of_time, "ptx", ptx)
    found = FakeTensorRTPlugin()
    for description in PLUGINS:
        register_ahead_of_time(LIBRARY, found, description, SM)
    return found


def tensor(dtype: str, *shape: int) -> Any:
    return FakeTensorRTPlugin.TensorDesc([FakeSize(size) for size in shape], dtype)


def fields(**values: int) -> dict[str, Any]:
    """Return attributes as `tensorrt.plugin` passes them."""
    return {name: np.array([value], np.int32) for name, value in values.items()}


def test_signatures_are_what_tensorrt_reads(plugins: FakeTensorRTPlugin) -> None:
    """`tensorrt.plugin` takes inputs, attributes and the number of outputs from annotations (`_validate.py`)."""
    described = inspect.signature(plugins.registered["sinkprune_ahead_of_time::DiversitySelect"])
    assert list(described.parameters) == ["tokens", "candidate", "reserved", "batch", "count"]
    annotations = [parameter.annotation for parameter in described.parameters.values()]
    assert annotations[:3] == [plugins.TensorDesc] * 3
    assert get_args(annotations[3])[1] == np.dtype[np.int32]
    # The scratch is one more output.
    assert described.return_annotation == tuple[plugins.TensorDesc, plugins.TensorDesc]
    compiled = inspect.signature(plugins.compiled["sinkprune_ahead_of_time::DiversitySelect"])
    assert list(compiled.parameters) == [*described.parameters, "outputs", "tactic"]
    assert compiled.return_annotation == tuple[str, bytes, plugins.KernelLaunchParams, plugins.SymIntExprs]


def test_outputs(plugins: FakeTensorRTPlugin) -> None:
    found = plugins.registered["sinkprune_ahead_of_time::TopRho"](
        tensor("FLOAT", G, N), tensor("BF16", G, N, D), **fields(per_mille=10)
    )
    assert [(output.dtype, list(output.shape_expr)) for output in found] == [("BF16", [G, 1, D]), ("INT32", [G, N])]
    inputs = (tensor("HALF", G, N, D), tensor("INT32", G, N), tensor("INT64", G, R))
    found = plugins.registered["sinkprune_ahead_of_time::DiversitySelect"](*inputs, **fields(batch=4, count=COUNT))
    assert [(output.dtype, list(output.shape_expr)) for output in found] == [
        ("INT64", [G, COUNT]),
        ("FLOAT", [G, 4, N]),
    ]


@pytest.mark.parametrize("per_mille", [0, 1, 10, 28, 1000])
def test_top_rho_is_the_launch_of_the_plugin_class(plugins: FakeTensorRTPlugin, per_mille: int) -> None:
    inputs = (tensor("FLOAT", G, N), tensor("HALF", G, N, D))
    values = fields(per_mille=per_mille).values()
    entry, image, launch, integers = plugins.compiled["sinkprune_ahead_of_time::TopRho"](*inputs, *values, (), 0)
    count = max(1, -(-N * per_mille // 1000))
    addresses = {"norms": 1, "tokens": 2, "sink": 3, "outlier": 4}
    (expected,) = top_rho_launches(addresses, {"G": G, "N": N, "D": D, "count": count}, "float16")
    assert (entry, image) == ("entry", b"top_rho float16")
    assert (launch.grid_x, launch.grid_y, launch.grid_z) == expected.grid
    assert (launch.block_x, launch.block_y, launch.block_z, launch.shared_mem) == (128, 1, 1, 1000)
    assert [1, 2, *integers, 3, 4] == [int(argument) for argument in expected.arguments]


@pytest.mark.parametrize(("width", "kernel"), [(48, "diversity_select"), (50, "diversity_select_unaligned")])
def test_diversity_select_is_all_phases_in_one_block_a_group(
    plugins: FakeTensorRTPlugin, width: int, kernel: str
) -> None:
    inputs = (tensor("FLOAT", G, N, width), tensor("INT32", G, N), tensor("INT64", G, R))
    values = fields(batch=4, count=COUNT).values()
    _, image, launch, integers = plugins.compiled["sinkprune_ahead_of_time::DiversitySelect"](*inputs, *values, (), 0)
    addresses = {"tokens": 0, "candidate": 1, "reserved": 2, "chosen": 3, "workspace": 4}
    sizes = {"G": G, "N": N, "D": width, "R": R, "count": COUNT, "batch": 4}
    phases = diversity_launches(addresses, sizes, "float32")
    (expected,) = in_one_launch(phases)
    assert expected.kernel == kernel
    assert image == f"{kernel} float32".encode()
    assert (launch.grid_x, launch.grid_y, launch.grid_z) == expected.grid
    assert [0, 1, 2, *integers, 3, 4] == [int(argument) for argument in expected.arguments]


def test_a_dynamic_width_is_refused(plugins: FakeTensorRTPlugin) -> None:
    tokens = tensor("HALF", G, N, D)
    tokens.shape_expr[2] = FakeDynamicSize(D)
    with pytest.raises(EnginesError, match="tokens of the plugin TopRho have a dynamic width"):
        plugins.compiled["sinkprune_ahead_of_time::TopRho"](
            tensor("FLOAT", G, N), tokens, *fields(per_mille=10).values(), (), 0
        )


def test_a_second_registration_changes_nothing(plugins: FakeTensorRTPlugin) -> None:
    before = dict(plugins.registered)
    register_ahead_of_time(LIBRARY, plugins, TOP_RHO, 86)
    assert plugins.registered == before


CLASSES: tuple[str, dict[str, str]] = ("sinkprune", {"TopRho": "sum"})
ALONE: tuple[str, dict[str, str]] = ("sinkprune_ahead_of_time", {})


@pytest.mark.parametrize(
    ("version", "sm", "shape_inputs", "expected"),
    [
        ("10.9.0.34", 87, False, ALONE),
        ("11.1.0", 87, False, ALONE),
        ("10.3.0.26", 87, False, CLASSES),
        ("10.13.3", 87, True, CLASSES),
        # No PTX is shipped for this sm, but the driver compiles that of a lower one.
        ("10.13.3", 121, False, CLASSES),
        ("10.13.3", 75, False, None),
    ],
)
def test_engines_need_the_plugin_classes_only_without_ahead_of_time_plugins(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    sm: int,
    shape_inputs: bool,
    expected: tuple[str, dict[str, str]] | None,
) -> None:
    found = FakeTensorRTPlugin()
    monkeypatch.setattr(registry, "shipped_sms", lambda: (80, 87, 120))
    monkeypatch.setattr(registry, "register", lambda library: CLASSES[1])
    monkeypatch.setattr(registry, "import_module", {"tensorrt.plugin": found}.__getitem__)
    library = SimpleNamespace(__name__="tensorrt", __version__=version, DataType=TYPES)
    assert registry.register_for_build(library, sm, shape_inputs=shape_inputs) == expected
    names = {f"sinkprune_ahead_of_time::{description.name}" for description in PLUGINS}
    assert set(found.registered) == (names if expected == ALONE else set())
