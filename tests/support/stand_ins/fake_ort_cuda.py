"""A stand-in for ONNX Runtime's CUDA provider: sessions compute on the CPU, in the memory of a fake device.

Like the provider with `enable_cuda_graph`, it captures a call that has a number, with the addresses of its binding,
and replays these addresses. It fails where the library would fail or give wrong values without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from sinkprune import Pipeline, Policy
from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.contract.report import CaptureReport
from sinkprune.runtime.backends.onnxruntime.cuda import CUDA, OrtCudaBackend
from support.stand_ins.fake_device import GARBAGE, FakeDevice
from support.stand_ins.fake_tensorrt import array_at, dtype_of

Place = tuple[np.dtype[Any], tuple[int, ...], int]
"""The type, shape and address of a bound tensor."""
_PLAIN = {*CUDA[1], "user_compute_stream"}


class FakeOrtCuda:
    """The module `onnxruntime` with a CUDA provider, bound to a fake device."""

    def __init__(self, device: FakeDevice, refused: Callable[[list[str]], bool] = lambda _: False) -> None:
        """Refuse to capture graphs whose inputs are `refused`, as the library does for those that copy sizes."""
        self.device, self.refused = device, refused
        self.sessions: list[FakeCudaSession] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(onnxruntime, name)

    def get_available_providers(self) -> list[str]:
        return [CUDA[0], "CPUExecutionProvider"]

    def InferenceSession(self, model: Any, options: Any, providers: list[Any], **_: Any) -> FakeCudaSession:
        ((name, own),) = providers
        assert name == CUDA[0] and own["user_compute_stream"] == str(self.device.stream)
        assert own.keys() - {"enable_cuda_graph"} == _PLAIN
        captures = own.get("enable_cuda_graph") == "1"
        session = FakeCudaSession(self.device, model, options, captures)
        if captures and self.refused([value.name for value in session.get_inputs()]):
            raise RuntimeError("This session cannot use the graph capture feature as requested by the user")
        self.sessions.append(session)
        return session


class FakeCudaSession:
    """A session, whose calls are enqueued on the fake device's stream."""

    def __init__(self, device: FakeDevice, model: Any, options: Any, captures: bool) -> None:
        self._device, self.captures = device, captures
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.get_inputs, self.get_outputs = self._session.get_inputs, self._session.get_outputs
        self.types = {value.name: dtype_of(value.type) for value in (*self.get_inputs(), *self.get_outputs())}
        self.graphs: dict[int, FakeBinding] = {}
        self.released: list[int] = []
        self.arena = np.empty(1 << 24, np.uint8)
        """The session's own memory: every call writes over all of it that an earlier one gave out."""
        self._given = 0

    def get_providers(self) -> list[str]:
        return [CUDA[0], "CPUExecutionProvider"]

    def io_binding(self) -> FakeBinding:
        return FakeBinding(self)

    def release_captured_graph(self, number: int) -> None:
        del self.graphs[number]
        self.released.append(number)

    def run_with_iobinding(self, binding: FakeBinding, options: Any) -> None:
        assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1", "the host would wait"
        number = int(options.get_run_config_entry("gpu_graph_id"))
        if number >= 0:
            assert self.captures and not binding.unbound
            known = self.graphs.setdefault(number, binding)
            assert known.places == binding.places, "a replay writes to the addresses of its capture"
            self._device.calls.append("replayed graph" if known is binding and binding.ran else "captured graph")
            binding.ran = True
        given, self._given = self._given, 0
        self._device.enqueue(lambda: self.arena[:given].fill(GARBAGE))
        if not binding.unbound:
            self._device.enqueue(lambda: self.compute(dict(binding.places)))
            return
        # The library knows sizes without waiting; the stand-in must compute.
        self._device.flush()
        for name, result in self.compute(dict(binding.places)).items():
            if name in binding.unbound:
                binding.given[name] = self._lent(result)

    def compute(self, places: dict[str, Place]) -> dict[str, Any]:
        """Read the bound inputs, run, write the bound outputs, and return all outputs."""
        inputs = {value.name: self._at(places[value.name]) for value in self.get_inputs()}
        names = [value.name for value in self.get_outputs()]
        results = dict(zip(names, self._session.run(names, inputs), strict=True))
        for name, result in results.items():
            if name in places:
                assert places[name][1] == result.shape, f"{name} is bound to {places[name][1]}, found {result.shape}"
                self._at(places[name])[...] = result
        return results

    def _at(self, place: Place) -> Any:
        dtype, shape, address = place
        return array_at(address, shape, dtype)

    def _lent(self, result: Any) -> Any:
        start = self._given
        self._given += -(-result.nbytes // 64) * 64
        memory = self.arena[start : start + result.nbytes].view(result.dtype).reshape(result.shape)
        memory[...] = result
        return memory


class FakeBinding:
    """Addresses of the inputs and outputs of a session."""

    def __init__(self, session: FakeCudaSession) -> None:
        self._types = session.types
        self.places: dict[str, Place] = {}
        self.unbound: list[str] = []
        self.given: dict[str, Any] = {}
        self.ran = False
        self._outputs: list[str] = []

    def bind_input(self, name: str, device: str, number: int, dtype: Any, shape: Any, address: int) -> None:
        assert (device, number, np.dtype(dtype)) == ("cuda", 0, self._types[name])
        assert address
        self.places[name] = np.dtype(dtype), tuple(shape), address

    def bind_output(
        self, name: str, device: str, number: int = 0, dtype: Any = None, shape: Any = None, address: Any = None
    ) -> None:
        self._outputs.append(name)
        if address is None:
            self.unbound.append(name)
        else:
            self.bind_input(name, device, number, dtype, shape, address)

    def get_outputs(self) -> list[Any]:
        """Values that share the session's own memory."""
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(memory) for name, memory in self.given.items()}
        return [values.get(name) for name in self._outputs]


def cuda_backend(library: FakeOrtCuda) -> OrtCudaBackend:
    """Return the real backend on a stand-in of the library, and on its device."""
    device: Any = library.device
    return OrtCudaBackend("ort-cuda", 1, "fastest", library, lambda: device)


class CudaRig:
    """A pipeline or a policy on such a library; chain and backend are the real ones."""

    def __init__(self, bundle: Path | Bundle, refused: Callable[[list[str]], bool] = lambda _: False) -> None:
        self.device = FakeDevice()
        self.library = FakeOrtCuda(self.device, refused)
        self.backend = cuda_backend(self.library)
        self.bundle = read_bundle(bundle) if isinstance(bundle, Path) else bundle

    def pipeline(self) -> Pipeline:
        return Pipeline(self.bundle, self.backend)

    def policy(self) -> Policy:
        return Policy(self.bundle, self.backend)

    @property
    def report(self) -> CaptureReport:
        return self.backend.captures.report()

    @contextmanager
    def counted(self) -> Iterator[dict[str, int]]:
        """Yield how often the device was asked for each thing within the block, when it is left."""
        start, counts = len(self.device.calls), dict[str, int]()
        yield counts
        counts.update(Counter(self.device.calls[start:]))
