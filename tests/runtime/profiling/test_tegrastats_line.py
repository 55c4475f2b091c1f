"""Lines that boards of each generation printed, with all their known forms."""

from __future__ import annotations

import pytest

from sinkprune.runtime.power.tegrastats_line import parse_line
from support.stand_ins import power_stand_ins as boards


@pytest.mark.parametrize(
    ("line", "rails", "total"),
    [
        (boards.ORIN_NANO, {"VDD_IN": 4761, "VDD_CPU_GPU_CV": 515, "VDD_SOC": 1428}, 4761),
        (boards.ORIN_NANO_BUSY, {"VDD_IN": 12479, "VDD_CPU_GPU_CV": 4667, "VDD_SOC": 2817}, 12479),
        (boards.ORIN_NX_7_2, {"VDD_IN": 7280}, 7280),
        (
            boards.AGX_ORIN,
            {"VDD_GPU_SOC": 3150, "VDD_CPU_CV": 14312, "VIN_SYS_5V0": 4968, "VDDQ_VDD2_1V8AO": 1091},
            3150 + 14312 + 4968,
        ),
        (
            boards.AGX_ORIN_7_2,
            {"VDD_GPU_SOC": 3034, "VDD_CPU_CV": 1137, "VIN_SYS_5V0": 4939},
            3034 + 1137 + 4939,
        ),
        (
            boards.THOR,
            {"VDD_GPU": 3561, "VDD_CPU_SOC_MSS": 7910, "VIN_SYS_5V0": 7620, "VIN": 26686},
            26686,
        ),
        (boards.THOR_IDLE, {"VDD_GPU": 6330, "VIN": 28906}, 28906),
        (boards.THOR.replace(" VIN 26686mW/26686mW", ""), None, 3561 + 7910 + 7620),
        (boards.TX2, {"VDD_SYS_GPU": 182, "VDD_4V0_WIFI": 0, "VDD_IN": 5297, "VDD_SYS_DDR": 1241}, 5297),
        ("VDD_GPU 5517mW VDD_CPU_SOC_MSS 7484mW VIN_SYS_5V0 6309mW VIN 28548mW", None, 28548),
        (boards.XAVIER, {"GPU": 0, "CPU": 311, "SOC": 932, "VDDRQ": 621, "SYS5V": 1482}, None),
        (boards.WITHOUT_RAILS, {}, None),
        (boards.AGX_ORIN.replace("VDD_CPU_CV 14312mW", "VDD_CPU_CV mW"), None, None),
        # Cut off where the command ended: this is not 9 mW.
        ("RAM 1/2MB (lfb 1x4MB) VDD_IN 9", {}, None),
        ("RAM 1/2MB (lfb 1x4MB) VDD_IN 9000mW/90", {}, None),
        ("", {}, None),
    ],
)
def test_rails_and_their_total(line: str, rails: dict[str, int] | None, total: int | None) -> None:
    found = parse_line(line)
    assert rails is None or found.rails == rails
    assert sum(found.rails[name] for name in found.total_rails) == (total or 0)
    assert bool(found.total_rails) == (total is not None)


@pytest.mark.parametrize(
    ("line", "clocks"),
    [
        (boards.ORIN_NANO, {"cpu": 729}),
        (boards.ORIN_NANO_BUSY, {"cpu": 729, "memory": 2133, "gpu": 621}),
        (boards.ORIN_NX_7_2, {"cpu": (4 * 1036 + 2 * 729) / 6}),
        (boards.AGX_ORIN, {"cpu": 2201, "memory": 2133, "gpu": 407}),
        (boards.AGX_ORIN_7_2, {"cpu": (4 * 729 + 2 * 1190) / 6, "gpu": 1300}),
        (boards.THOR_IDLE, {"cpu": 2601, "memory": 4266, "gpu": 1574}),
        (boards.TX2, {"cpu": (1421 + 2031 + 2034 + 1420) / 4, "memory": 1866, "gpu": 1300}),
        ("GR3D_FREQ 0%@[1300, 0]", {"gpu": 650}),
        ("GR3D_FREQ 0% EMC_FREQ 0%", {}),
        ("CPU [off,off] GR3D_FREQ @[]", {}),
    ],
)
def test_clocks_are_means_of_the_units_that_are_on(line: str, clocks: dict[str, float]) -> None:
    assert parse_line(line).clocks == pytest.approx(clocks)


def test_temperatures_are_present_ones_of_sensors_that_work() -> None:
    nano = parse_line(boards.ORIN_NANO).temperatures
    assert nano == {"cpu": 48.468, "soc2": 47.531, "soc0": 48.062, "gpu": 48.562, "tj": 49.156, "soc1": 49.156}
    assert parse_line(boards.ORIN_NX_7_2).temperatures["tj"] == 59.687
    agx = parse_line(boards.AGX_ORIN).temperatures
    assert agx["Tboard"] == 62 and "CV2" not in agx
    assert parse_line("tj@-12.5C Tdiode@N.NC").temperatures == {"tj": -12.5}
