"""Measures how late the ticks of `PolicyLoop` are, and its memory, beside a policy that computes all the time.

    sinkprune-export demo/pocket-robot -o robot --max-images 2
    python benchmarks/robot/loop_jitter.py robot --rate 50 --seconds 600 --chunk-ms 300 --json jitter.json

The policy is the pocket robot with so many denoising steps that a chunk takes about `--chunk-ms`, on all cores. Each
of its actions counts several times, so that a chunk has 50, as pi0's has. Run it on an idle machine: other programs
make ticks late. Ends with exit code 1 after a fault.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sinkprune import ActionReport, Observed, Policy, PolicyLoop
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import write_json
from sinkprune.demo.robot_table import RobotTable
from sinkprune.policies.loop import LoopReport
from sinkprune.runtime.processor import processor_name

_PAGE = os.sysconf("SC_PAGE_SIZE")
_ACTIONS = 50
_EVERY = 100
"""The ticks between two readings of memory."""


class StretchedPolicy:
    """A policy whose chunks have `_ACTIONS` actions, each of the real ones several times."""

    def __init__(self, policy: Policy, steps: int) -> None:
        self._policy, self._steps, self.facts = policy, steps, policy.facts

    def act(self, *given: Any, **options: Any) -> ActionReport:
        """Return the policy's chunk; held actions are those of the first tick, so none are held."""
        report = self._policy.act(*given, **{**options, "held": None, "steps": self._steps})
        places = np.linspace(0, len(report.actions) - 1, _ACTIONS).round().astype(int)
        return replace(report, actions=report.actions[places])


def resident_mb() -> float:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / 1e6


def steps_for(policy: Policy, table: RobotTable, chunk_ms: float) -> int:
    """Return the denoising steps with which a chunk takes so long."""

    def median(steps: int) -> float:
        given = table.cameras(), table.instruction, table.state()
        return sorted(policy.act(*given, steps=steps).ms["latency"] for _ in range(15))[7]

    median(60)  # The first chunks are slow.
    few, many = median(10), median(60)
    return max(1, round(10 + 50 * (chunk_ms - few) / (many - few)))


def measured(policy: Policy, steps: int, rate: float, seconds: float) -> tuple[LoopReport, list[float]]:
    """Run the loop; returns its report, and its memory in MB every so many ticks."""
    table, memory, ticks = RobotTable("test 0"), list[float](), 0
    cameras = table.cameras()

    def send(action: Any) -> None:
        nonlocal ticks
        if ticks % _EVERY == 0:
            memory.append(resident_mb())
        ticks += 1

    def observe() -> Observed:
        return Observed(cameras, table.state())

    stretched: Any = StretchedPolicy(policy, steps)
    # A chunk lasts a second at 50 Hz; what hangs for longer still ends the run.
    loop = PolicyLoop(stretched, observe, send, table.instruction, rate_hz=rate, max_age_ms=5000)
    return loop.run(seconds), memory


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--chunk-ms", type=float, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    policy = Policy.load(options.bundle)
    steps = steps_for(policy, RobotTable("test 0"), options.chunk_ms)
    report, memory = measured(policy, steps, options.rate, options.seconds)
    late = report.lateness_ms.as_json()
    sys.stdout.write(
        f"{report.ticks} ticks at {options.rate:g} Hz beside {report.chunks} chunks of "
        f"{report.chunk_ms.quantile(0.5):.0f} ms ({steps} steps, {policy.backend.threads} threads)\n"
        f"late by {late['median']:.2f} ms (median), {late['p99']:.2f} (p99), {late['p99.9']:.2f} (p99.9), "
        f"{late['max']:.2f} (most); {report.missed_ticks} missed, {report.held_ticks} held; "
        f"{'with' if report.real_time else 'without'} real-time priority\n"
        f"memory: {memory[len(memory) // 10]:.0f} MB after a tenth of the time, {memory[-1]:.0f} MB at the end\n"
    )
    write_json(options.json, {"machine": processor_name(), "steps": steps, "memory_mb": memory, **report.as_json()})
    if report.fault is not None:
        raise RuntimeError(f"the loop stopped: {report.fault.message}")


if __name__ == "__main__":
    sys.exit(main())
