"""Lines that boards of each generation printed, with all their known forms."""

from __future__ import annotations

import pytest

from sinkprune.runtime.power.sensors import parse_rails, total_rails
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
    found = parse_rails(line)
    assert rails is None or found == rails
    assert sum(found[name] for name in total_rails(found)) == (total or 0)
    assert bool(total_rails(found)) == (total is not None)
