"""The energy of x86 processors and their memory, by the RAPL counters of Linux: Intel's, and AMD's since Zen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from sinkprune.contract.errors import NoSensorError, PowerError
from sinkprune.runtime.power import ROOT, Reading
from sinkprune.runtime.power.counter import next_count

_FOLDER = Path("sys/class/powercap")
# The same domains show again as intel-rapl-mmio; psys holds the packages, and core and uncore lie within them.
_ZONES = "intel-rapl:*"
_COUNTED = re.compile(r"package-\d+|dram")
_PERIOD = 0.02


class Rapl:
    """The counters of all packages, and of memory where it is counted apart."""

    name = "rapl"

    def __init__(self, root: Path = ROOT) -> None:
        """Finds the counters below `root`, and that they may be read. Raises `NoSensorError` and `PowerError`."""
        folder = root / _FOLDER
        zones = [(zone, (zone / "name").read_text().strip()) for zone in sorted(folder.glob(_ZONES)) if zone.is_dir()]
        self._domains = [_Domain.of(zone, name) for zone, name in zones if _COUNTED.fullmatch(name)]
        if not self._domains:
            raise NoSensorError(
                f"there is no RAPL counter of a processor below '{folder}' ({_ZONES}). Virtual machines have none, "
                "and elsewhere the kernel's module is missing: modprobe intel_rapl_msr."
            )
        self.measures = f"{' + '.join(domain.name for domain in self._domains)} of this machine's processors"
        self._counts = self._read()
        self._microjoules = 0

    def start(self) -> None:
        self._microjoules, self._counts = 0, self._read()

    def read(self) -> Reading:
        now, counts = next_count(self._read, self._counts, _PERIOD, "the RAPL counter")
        for domain, count, before in zip(self._domains, counts, self._counts, strict=True):
            # Counters begin anew behind their range, after some minutes to hours.
            self._microjoules += count - before + (domain.range if count < before else 0)
        self._counts = counts
        return Reading(now, self._microjoules / 1e6)

    def stop(self) -> None:
        """Nothing was begun."""

    def _read(self) -> list[int]:
        return [domain.microjoules() for domain in self._domains]


class _Domain(NamedTuple):
    """One counter."""

    zone: Path
    name: str
    range: int
    """Microjoules that it counts before it begins anew."""

    @staticmethod
    def of(zone: Path, name: str) -> _Domain:
        return _Domain(zone, name, _number(zone / "max_energy_range_uj"))

    def microjoules(self) -> int:
        return _number(self.zone / "energy_uj")


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except PermissionError as error:
        raise PowerError(
            f"'{path}' may not be read: no permission. Run this command with sudo, or until the next start of the "
            "machine allow it to everybody, who can then guess at what others compute (CVE-2020-8694): sudo chmod "
            f"a+r {path.parents[1]}/{_ZONES}/energy_uj"
        ) from error
    except (OSError, ValueError) as error:
        raise PowerError(f"'{path}' tells no number: {error}.") from error
