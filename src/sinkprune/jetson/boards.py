"""Facts about Jetson modules and JetPack, from `boards.json`, where each fact has its source.

Figures are for the GPU alone, dense, in the fastest power mode. They come from datasheets, not from measurements.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated

from sinkprune.contract.checks.fields import Bounds, SchemaError, from_json
from sinkprune.contract.errors import UnknownBoardError
from sinkprune.contract.files.untrusted import read_json
from sinkprune.contract.manifest import DialectName

_FILE = Path(__file__).with_name("boards.json")
_UNSOURCED = {"module", "sources"}

Figure = Annotated[float, Bounds(0.1, 1e5)]
"""A figure of a datasheet, in the unit of its name."""


@dataclass(frozen=True)
class FactSource:
    """The source of a fact."""

    document: str
    url: str
    checked: str
    """Whether and how it was verified."""


@dataclass(frozen=True)
class Board:
    """A Jetson module."""

    module: str
    """The vendor's name."""
    sm: Annotated[int, Bounds(50, 999)]
    """The GPU's compute capability: 87 for sm_87."""
    memory_gb: Annotated[int, Bounds(1, 1024)]
    """GiB, which CPU and GPU share."""
    gb_per_s: Figure
    """The memory's peak bandwidth, in 1e9 bytes a second."""
    fp16_tflops: Figure
    """Dense, in 1e12 operations a second."""
    int8_tops: Figure | None
    """Dense, in 1e12 operations a second; None if unknown."""
    power_modes: tuple[str, ...]
    compatible: tuple[str, ...]
    """Words in /proc/device-tree/compatible that identify the module; empty if no public source has one."""
    sources: dict[str, str]
    """The name of each fact's source, by the fact."""


@dataclass(frozen=True)
class SystemMemory:
    """The share of a module's memory that is not for programs."""

    linux_sees_per_mille: Annotated[int, Bounds(1, 1000)]
    """The share of the module's memory that firmware leaves to Linux."""
    system_takes_mb: Annotated[int, Bounds(0, 1 << 20)]
    """MiB that a system without a desktop uses."""
    sources: dict[str, str]


@dataclass(frozen=True)
class JetPack:
    """A release of JetPack, and its components."""

    version: str
    first_l4t: str
    """Its first release of Jetson Linux (L4T)."""
    ubuntu: str
    python: str
    cuda: str
    tensorrt: str
    dialect: DialectName
    """The newest dialect that its TensorRT supports."""
    sm: tuple[int, ...]
    """The GPUs of its boards."""
    source: str


@dataclass(frozen=True)
class Boards:
    """The content of `boards.json`."""

    sources: dict[str, FactSource]
    system_memory: SystemMemory
    boards: dict[str, Board]
    """By the names of `sinkprune-doctor --board`."""
    chips: dict[str, str]
    """Names of the modules with a chip, by the chip's word in /proc/device-tree/compatible."""
    jetpacks: tuple[JetPack, ...]
    """Oldest first."""

    def board(self, name: str) -> Board:
        """Return the board with this name. Raises `UnknownBoardError` with the known names."""
        if name not in self.boards:
            raise UnknownBoardError(f"unknown board '{name}'; known boards: {', '.join(self.boards)}.")
        return self.boards[name]

    def name_of(self, compatible: Iterable[str]) -> str | None:
        """Return the name of the board whose device tree has these words; None if it is unknown."""
        words = set(compatible)
        return next((name for name, board in self.boards.items() if words & set(board.compatible)), None)

    def jetpack(self, l4t: str) -> JetPack | None:
        """Return the JetPack of a release of L4T, as in "36.4.3"; None if its major number is unknown, or too old."""
        found = _numbers(l4t)
        before = [pack for pack in self.jetpacks if _numbers(pack.first_l4t) <= found]
        return before[-1] if before and _numbers(before[-1].first_l4t)[0] == found[0] else None

    def usable_bytes(self, board: Board) -> int:
        """Return about how many bytes of a board's memory are for programs."""
        rest = self.system_memory
        return (board.memory_gb << 30) * rest.linux_sees_per_mille // 1000 - (rest.system_takes_mb << 20)


@cache
def read_boards() -> Boards:
    """Return the known boards and releases."""
    return parse_boards(read_json(_FILE))


def parse_boards(data: object) -> Boards:
    """Return the boards of parsed JSON. Raises `SchemaError` for malformed facts, and for facts without a source."""
    boards = from_json(Boards, data)
    for name, board in boards.boards.items():
        facts = {field.name for field in fields(board)} - _UNSOURCED
        known = {fact for fact in facts if getattr(board, fact) not in (None, ())}
        _check_sources(boards, f"$.boards.{name}", known, board.sources)
    own = {field.name for field in fields(SystemMemory)} - _UNSOURCED
    _check_sources(boards, "$.system_memory", own, boards.system_memory.sources)
    for number, jetpack in enumerate(boards.jetpacks):
        _check_sources(boards, f"$.jetpacks[{number}]", {"source"}, {"source": jetpack.source})
    releases = [_numbers(jetpack.first_l4t) for jetpack in boards.jetpacks]
    if releases != sorted(releases):
        raise SchemaError("$.jetpacks: expected the oldest first")
    return boards


def _check_sources(boards: Boards, where: str, facts: set[str], sources: dict[str, str]) -> None:
    for fact in sorted(facts ^ set(sources)):
        raise SchemaError(f"{where}.sources: expected one source for each fact, look at '{fact}'")
    for fact, source in sources.items():
        if source not in boards.sources:
            raise SchemaError(f"{where}.sources.{fact}: '{source}' is none of the sources")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without zeros at its end: 36.4.0 is 36.4."""
    parts = [int(part) if part.isdecimal() else 0 for part in version.split(".")]
    while len(parts) > 1 and parts[-1] == 0:
        parts.pop()
    return tuple(parts)
