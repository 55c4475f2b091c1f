"""Measures how late the ticks of `PolicyLoop` are, and its memory, beside a policy that computes all the time.

    sinkprune-export demo/pocket-robot -o robot --max-images 2
    python benchmarks/robot/loop_jitter.py robot --rate 50 --seconds 600 --chunk-ms 300 --json jitter.json

The policy is the pocket robot with so many denoising steps that a chunk takes about `--chunk-ms`, on all cores. Run
it on an idle machine: other programs make ticks late.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sinkprune import Observed, Policy, PolicyLoop
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import write_json
from sinkprune.demo.robot_table import RobotTable
from sinkprune.runtime.system import processor_name

_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_mb() -> float:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / 1e6


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--chunk-ms", type=float, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    policy, table = Policy.load(options.bundle), RobotTable("test 0")
    cameras, memory = table.cameras(), list[float]()

    def step_ms(steps: int) -> float:
        reports = [policy.act(cameras, table.instruction, table.state(), steps=steps) for _ in range(5)]
        return sorted(report.ms["latency"] for report in reports)[2]

    few, many = step_ms(10), step_ms(60)
    steps = max(1, round(10 + 50 * (options.chunk_ms - few) / (many - few)))

    def send(action: Any) -> None:
        if not loop_ticks[0] % 500:
            memory.append(resident_mb())
        loop_ticks[0] += 1

    loop_ticks = [0]
    loop = PolicyLoop(
        policy,
        lambda: Observed(cameras, table.state()),
        send,
        table.instruction,
        rate_hz=options.rate,
        steps=steps,
        max_age_ms=60_000,
    )
    report = loop.run(options.seconds)
    late = report.lateness_ms.as_json()
    sys.stdout.write(
        f"{report.ticks} ticks at {options.rate:g} Hz beside chunks of {report.chunk_ms.quantile(0.5):.0f} ms "
        f"({steps} steps, {policy.backend.threads} threads)\n"
        f"late by {late['median']:.2f} ms (median), {late['p99']:.2f} (p99), {late['p99.9']:.2f} (p99.9), "
        f"{late['max']:.2f} (most); {report.missed_ticks} missed\n"
        f"memory: {memory[min(1, len(memory) - 1)]:.0f} MB after 10 s, {memory[-1]:.0f} MB at the end\n"
    )
    write_json(options.json, {"machine": processor_name(), "steps": steps, "memory_mb": memory, **report.as_json()})


if __name__ == "__main__":
    sys.exit(main())
