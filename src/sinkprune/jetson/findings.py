"""What about a machine stands in the way, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sinkprune.contract.system.memory_need import gigabytes
from sinkprune.jetson.boards import Board, Boards, JetPack
from sinkprune.jetson.fit import BOARD_BACKEND, ModelFit
from sinkprune.jetson.host.machine import Machine
from sinkprune.jetson.recommendation import best_choice, choices, refused_by_backend
from sinkprune.runtime.backends.known import KNOWN, ON_CPU

_BACKENDS = {
    library: tuple(name for name in (*ON_CPU, BOARD_BACKEND, "tensorrt-rtx") if library in KNOWN[name].libraries)
    for library in ("onnxruntime", "openvino", "tensorrt", "tensorrt_rtx")
}
"""The backends that need each engine library."""
_TENSORRT = (BOARD_BACKEND,)
_GPU_ACCESS = ("cuda.bindings", "pycuda")
_LITTLE_MEMORY_GB = 8
_LITTLE_DISK = 10_000_000_000
_VENV = "python{minor} -m venv --system-site-packages .venv"


@dataclass(frozen=True)
class Finding:
    """Something about a machine, a board or a model."""

    stops: bool
    """Whether what was asked for cannot run as long as it is so."""
    found: str
    do: str
    backends: tuple[str, ...] = ()
    """The backends that cannot run as long as it is so; none where it concerns all or is a note."""
    model: str | None = None
    """The model that cannot run; None where it concerns the machine."""

    def blocks(self, model: ModelFit) -> bool:
        """Return whether this model cannot run on its backend as long as it is so."""
        return (
            self.stops and self.model in (None, model.name) and (not self.backends or model.backend in self.backends)
        )


def machine_findings(machine: Machine, boards: Boards) -> Iterator[Finding]:
    """What is found on a machine, whatever is to run there."""
    board = boards.board(machine.board) if machine.board else None
    jetpack = boards.jetpack(machine.jetpack.l4t) if machine.jetpack.l4t else None
    for told in machine.unreadable:
        yield Finding(False, f"not readable: {told}", "run as root to know: sudo $(command -v sinkprune-doctor)")
    if machine.chip:
        yield from _board_findings(machine, board, jetpack)
        yield from _tensorrt_findings(machine)
        yield from _speed_findings(machine)
        yield from _swap_findings(machine, board)
    yield from _library_findings(machine)
    if machine.disk_free_bytes is not None and machine.disk_free_bytes < _LITTLE_DISK:
        yield Finding(
            False,
            f"{gigabytes(machine.disk_free_bytes)} of disk are free at '{machine.disk}'",
            "bundle and engines of a 7B take 4 GB each in int4, 14 in fp16: free some, keep them on another disk, or "
            "build with --move, which leaves engines only",
        )


def model_findings(models: Sequence[ModelFit], jetpack: JetPack | None, memory: int) -> Iterator[Finding]:
    """What is found of models on a machine with `memory` bytes to take; 0 is not known.

    `jetpack` is the one whose TensorRT is to build engines; None elsewhere.
    """
    for model in models:
        if not any(model.fitting()):
            least = min(fit.memory_bytes for form in model.forms for fit in form.budgets.values())
            yield Finding(
                True,
                f"'{model.name}' fits in no form: it needs {gigabytes(least)} at least, "
                f"{gigabytes(memory)} can be taken",
                "end other programs, take a smaller model or a board with more memory",
                model=model.name,
            )
        elif model.kind != "preset" and not any(form.exported for form, _ in model.fitting()):
            form = next(form for form in model.forms if form.exported)
            least = min(fit.memory_bytes for fit in form.budgets.values())
            yield Finding(
                True,
                f"'{model.name}' needs {gigabytes(least)} at least as it is exported, "
                f"{gigabytes(memory)} can be taken",
                _smaller(model),
                model=model.name,
            )
        else:
            yield from _build_findings(model, memory)
        if jetpack and model.kind == "bundle" and model.backend != BOARD_BACKEND:
            yield from _processor_bundle_findings(model, jetpack)
        if model.kind == "bundle" and model.backend == BOARD_BACKEND:
            yield from _tensorrt_bundle_findings(model, jetpack)


def _smaller(model: ModelFit) -> str:
    """The advice to export a model in the form that is recommended."""
    best = best_choice(model)
    return f"export it again with --weights {best[0].decoder_form}" if best else "take a smaller model"


def _build_findings(model: ModelFit, memory: int) -> Iterator[Finding]:
    """What is found where a model could run, but its engines cannot be built there."""
    forms = [form for form, _ in model.fitting() if (form.exported or model.kind == "preset")]
    wanted = [form for form in forms if not refused_by_backend(model, form)]
    if not wanted or any(form in wanted for form in choices(model)):
        return
    build = min((form.build for form in wanted if form.build), key=lambda build: build.memory_bytes)
    yield Finding(
        True,
        f"engines of '{model.name}' cannot be built here: a build needs about {gigabytes(build.memory_bytes)} of "
        f"memory ({gigabytes(memory)} are free) and, with --move, {gigabytes(build.moving_disk_bytes)} of disk",
        f"end other programs and free disk, or {_smaller(model)}",
        model=model.name,
    )


def _board_findings(machine: Machine, board: Board | None, jetpack: JetPack | None) -> Iterator[Finding]:
    if board is None:
        yield Finding(
            False,
            f"this is a {machine.chip}, but which module is not known: {machine.model}",
            "name the one that is most like it: sinkprune-doctor --board NAME",
        )
    if machine.jetpack.l4t is None:
        yield Finding(
            True,
            "/etc/nv_tegra_release names no release of Jetson Linux",
            "install JetPack 6.2 or 7.2",
            _TENSORRT,
        )
    elif jetpack is None:
        yield Finding(
            True,
            f"Jetson Linux {machine.jetpack.l4t} is of no JetPack that this sinkprune knows",
            "install JetPack 6.2 or 7.2, or upgrade sinkprune",
            _TENSORRT,
        )
    elif machine.python.minor != jetpack.python and not machine.jetpack.tensorrt_python:
        yield Finding(
            True,
            f"this Python is {machine.python.minor}; JetPack {jetpack.version} has {jetpack.python}",
            f"make the environment with the system's: {_VENV.format(minor=jetpack.python)}",
            _TENSORRT,
        )


def _tensorrt_findings(machine: Machine) -> Iterator[Finding]:
    installed, python = machine.jetpack, machine.python
    if not installed.tensorrt_python:
        yield Finding(
            True,
            "TensorRT's Python module is not installed for the system's Python",
            "sudo apt-get install nvidia-jetpack python3-libnvinfer",
            _TENSORRT,
        )
    elif python.minor not in installed.tensorrt_python:
        pythons = " and ".join(installed.tensorrt_python)
        yield Finding(
            True,
            f"TensorRT {installed.tensorrt or ''} is installed for Python {pythons}, this is {python.minor}",
            f"make the environment again: {_VENV.format(minor=installed.tensorrt_python[-1])}",
            _TENSORRT,
        )
    elif not python.sees_system:
        yield Finding(
            True,
            "this virtual environment does not see the system's packages, TensorRT among them",
            f"make it again: {_VENV.format(minor=python.minor)}",
            _TENSORRT,
        )
    if not any(map(python.imports, _GPU_ACCESS)):
        major = (installed.cuda or "12").split(".")[0]
        yield Finding(
            True,
            "neither cuda-python nor pycuda can be imported, by which TensorRT's engines run",
            f"pip install 'cuda-python>={major},<{int(major) + 1}'"
            if major.isdecimal()
            else "pip install cuda-python",
            _TENSORRT,
        )


def _speed_findings(machine: Machine) -> Iterator[Finding]:
    mode = machine.power_mode
    if mode is None:
        yield Finding(False, "the power mode is not told", "ask for it: sudo nvpmodel -q")
    elif not mode.is_fastest and mode.fastest:
        name, number = mode.fastest
        yield Finding(
            False,
            f"the power mode is {mode.name or mode.id}, not {name}",
            f"for all that the board can do: sudo nvpmodel -m {number} (more heat; it may ask to reboot)",
        )
    clock = machine.gpu_clock
    if clock and clock.least is not None and clock.most and clock.least < clock.most:
        yield Finding(
            False,
            f"the GPU's clock may fall to {clock.least} of {clock.most} MHz between requests",
            "for steady latency: sudo jetson_clocks (until the next boot)",
        )


def _swap_findings(machine: Machine, board: Board | None) -> Iterator[Finding]:
    if board is None or board.memory_gb > _LITTLE_MEMORY_GB or any(not swap.compressed for swap in machine.swap):
        return
    kind = "zram is its only swap, which lies in the same memory" if machine.swap else "it has no swap"
    yield Finding(
        False,
        f"{kind}: building engines on {board.memory_gb} GB may be killed",
        "jetson/setup.sh --swap 8, or build with other programs ended",
    )


def _library_findings(machine: Machine) -> Iterator[Finding]:
    libraries = machine.python.libraries
    for name, library in libraries.items():
        if library.error:
            yield Finding(
                name in _BACKENDS,
                f"{name} is installed but does not import: {library.error}",
                "reinstall it for this Python, or remove it",
                _BACKENDS.get(name, ()),
            )
    if not any(name in libraries for name in _BACKENDS):
        yield Finding(True, "no engine library is installed", "pip install 'sinkprune[cpu]'")


def _processor_bundle_findings(model: ModelFit, jetpack: JetPack) -> Iterator[Finding]:
    """What ONNX Runtime takes none of in the Python of a JetPack; its 1.23 is the last for Python 3.10."""
    if jetpack.python == "3.10" and model.backend != "openvino" and model.dialect != "opset20":
        yield Finding(
            True,
            f"'{model.name}' is of dialect {model.dialect}; ONNX Runtime for Python {jetpack.python} of JetPack "
            f"{jetpack.version} takes opset20",
            "export it again with --dialect opset20",
            model=model.name,
        )


def _tensorrt_bundle_findings(model: ModelFit, jetpack: JetPack | None) -> Iterator[Finding]:
    own = next(form for form in model.forms if form.exported)
    if own.precision != "fp16":
        yield Finding(
            True,
            f"'{model.name}' has states in {own.precision}, and TensorRT builds attention in fp16 only",
            "export it again with --precision fp16",
            model=model.name,
        )
    if "uint4" in own.weights:
        yield Finding(
            True,
            f"'{model.name}' has uint4 weights, which TensorRT takes none of",
            "export with int4",
            model=model.name,
        )
    if jetpack and jetpack.dialect == "opset20" and model.dialect != "opset20":
        yield Finding(
            True,
            f"'{model.name}' is of dialect {model.dialect}; TensorRT {jetpack.tensorrt} of JetPack {jetpack.version} "
            "takes opset20",
            "export it again with --dialect opset20",
            model=model.name,
        )
