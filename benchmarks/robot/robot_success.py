"""Measures how often the pocket robot picks the named object, by pruning method and budget, in closed-loop episodes.

    sinkprune-export demo/pocket-robot -o robot --max-images 2 --methods sinkpruner,random
    python benchmarks/robot/robot_success.py robot --episodes 500 --json success.json

Every method and budget sees the same tables and the same noise. The robot runs four actions of a chunk, then looks
again. An episode fails if the gripper closes on another object, or on none within 40 steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sinkprune import Policy
from sinkprune.calibration.evaluation.intervals import wilson
from sinkprune.contract.command_line.command import run_command
from sinkprune.contract.command_line.json_output import write_json
from sinkprune.contract.command_line.progress_lines import ProgressLines
from sinkprune.demo.robot_table import RobotTable
from sinkprune.runtime.system.processor import processor_name

RUN = 4
"""Actions of each chunk that the robot runs before it looks again."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with `arguments`, or the process's own if None; returns the exit code."""
    return run_command(_measure, arguments)


def _measure(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    policy = Policy.load(options.bundle, threads=options.threads)
    plans = [("sinkpruner", "none")]
    plans += [(method, budget) for method, own in policy.bundle.manifest.plans.items() for budget in own]
    chunks: dict[tuple[str, str], list[float]] = {plan: [] for plan in plans}
    picked: dict[tuple[str, str], int] = dict.fromkeys(plans, 0)
    with ProgressLines("acting", options.episodes * len(plans), "episodes") as lines:
        for number in range(options.episodes):
            # Methods take turns, so that times are of the same minutes.
            for plan in plans:
                picked[plan] += run_episode(policy, number, *plan, chunks[plan])
                lines.update(advance=1)
    rows = [
        _row(method, budget, picked[method, budget], options.episodes, chunks[method, budget])
        for method, budget in plans
    ]
    print_table(rows, options.episodes)
    where = {"machine": processor_name(), "versions": dict(policy.backend.versions), "threads": options.threads}
    write_json(options.json, {**where, "episodes": options.episodes, "rows": rows})


def run_episode(policy: Policy, number: int, method: str, budget: str, ms: list[float]) -> bool:
    """Return whether the robot picks the named object in episode `number`; adds the time of each chunk to `ms`."""
    table, chunk = RobotTable(f"test {number}"), 0
    while not table.done:
        seed = 1000 * number + chunk
        report = policy.act(
            table.cameras(), table.instruction, table.state(), method=method, budget=budget, seed=seed
        )
        ms.append(report.ms["latency"])
        for action in report.actions[:RUN]:
            if not table.done:
                table.step(action)
        chunk += 1
    return table.succeeded


def _row(method: str, budget: str, picked: int, episodes: int, ms: Sequence[float]) -> dict[str, Any]:
    return {
        "method": method,
        "budget": budget,
        "success": picked / episodes,
        "ci95": wilson(picked, episodes),
        "chunk_ms": statistics.median(ms),
        "chunks_an_episode": len(ms) / episodes,
    }


def print_table(rows: Sequence[dict[str, Any]], episodes: int) -> None:
    """Print the rows as Markdown."""
    sys.stdout.write(
        f"{episodes} episodes\n\n| method | budget | success %, 95 % interval | a chunk ms | chunks an episode |\n"
    )
    sys.stdout.write("| --- | --- | --- | --- | --- |\n")
    for row in rows:
        low, high = (100 * end for end in row["ci95"])
        success = f"{100 * row['success']:.1f} ({low:.1f} to {high:.1f})"
        figures = f"{row['chunk_ms']:.1f} | {row['chunks_an_episode']:.1f}"
        sys.stdout.write(f"| `{row['method']}` | `{row['budget']}` | {success} | {figures} |\n")


if __name__ == "__main__":
    sys.exit(main())
