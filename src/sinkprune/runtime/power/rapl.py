"""The energy of x86 processors and their memory, from Linux's RAPL counters (Intel, and AMD since Zen)."""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path

from sinkprune.contract.errors import NoSensorError, PowerError
from sinkprune.runtime.power.sensor import Reading, Sensor, count_steps

# The same domains are listed again as intel-rapl-mmio. psys includes packages, and packages include core and uncore.
_ZONES = "intel-rapl:*"
_COUNTED = re.compile(r"package-\d+|dram")


def open_rapl(root: Path) -> Sensor:
    """Return the counters of all packages, and of memory that no package includes.

    Raises `NoSensorError` without a counter below `root`, and `PowerError` for one that cannot be read.
    """
    folder = root / "sys/class/powercap"
    zones = {zone: (zone / "name").read_text().strip() for zone in sorted(folder.glob(_ZONES)) if zone.is_dir()}
    counted = {zone: name for zone, name in zones.items() if _COUNTED.fullmatch(name)}
    if not counted:
        raise NoSensorError(
            f"there is no RAPL counter of a processor below '{folder}' ({_ZONES}). Virtual machines have none, "
            "and elsewhere the kernel's module is missing: modprobe intel_rapl_msr."
        )
    # A counter restarts at 0 after minutes to hours.
    ranges = [_read_number(zone / "max_energy_range_uj") for zone in counted]

    def read() -> list[int]:
        return [_read_number(zone / "energy_uj") for zone in counted]

    def readings() -> Generator[Reading]:
        for seconds, microjoules in count_steps(read, ranges, "the RAPL counter"):
            yield Reading(seconds, microjoules / 1e6)

    read()
    return Sensor("rapl", f"{' + '.join(counted.values())} of this machine's processors", readings)


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text())
    except PermissionError as error:
        raise PowerError(
            f"'{path}' may not be read: no permission. Run this command with sudo, or until the next start of the "
            "machine allow it to everybody, who can then guess at what others compute (CVE-2020-8694): sudo chmod "
            f"a+r {path.parents[1]}/{_ZONES}/energy_uj"
        ) from error
    except (OSError, ValueError) as error:
        raise PowerError(f"'{path}' holds no number: {error}.") from error
