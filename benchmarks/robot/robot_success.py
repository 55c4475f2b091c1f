"""Measures how often the pocket robot picks the named object, by pruning method and budget, in closed-loop episodes.

    sinkprune-export demo/pocket-robot -o robot --max-images 2 --methods sinkpruner,random
    python benchmarks/robot/robot_success.py robot --episodes 500 --json success.json

Every method and budget sees the same tables and the same noise, so differences from the first method are paired by
episode. The robot runs four actions of a chunk, then looks again. An episode fails if the gripper closes on another
object, or on none within 40 steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sinkprune import Policy
from sinkprune.calibration.evaluation.intervals import PictureBootstrap, wilson
from sinkprune.contract.command_line.command import run_command
from sinkprune.contract.command_line.json_output import write_json
from sinkprune.contract.command_line.progress_lines import ProgressLines
from sinkprune.demo.robot_table import RobotTable
from sinkprune.runtime.system.processor import processor_name

FIRST = "sinkpruner"
"""The method that the others are compared with, at the same budget."""
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
    plans = [(FIRST, "none")]
    plans += [(method, budget) for method, own in policy.bundle.manifest.plans.items() for budget in own]
    chunks: dict[tuple[str, str], list[float]] = {plan: [] for plan in plans}
    picked: dict[tuple[str, str], list[bool]] = {plan: [] for plan in plans}
    with ProgressLines("acting", options.episodes * len(plans), "episodes") as lines:
        for number in range(options.episodes):
            # Methods take turns, so that times are of the same minutes.
            for plan in plans:
                picked[plan].append(run_episode(policy, number, *plan, chunks[plan]))
                lines.update(advance=1)
    rows = [_row(*plan, picked, chunks[plan]) for plan in plans]
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


def _row(
    method: str, budget: str, picked: Mapping[tuple[str, str], Sequence[bool]], ms: Sequence[float]
) -> dict[str, Any]:
    """Return the figures of one row. `picked` has the episodes of all rows."""
    own, first = picked[method, budget], picked.get((FIRST, budget))
    versus = None
    if first is not None and method != FIRST:
        difference = [int(mine) - int(its) for mine, its in zip(own, first, strict=True)]
        versus = asdict(PictureBootstrap([str(number) for number in range(len(own))])(difference))
    return {
        "method": method,
        "budget": budget,
        "success": sum(own) / len(own),
        "ci95": wilson(sum(own), len(own)),
        "versus_first": versus,
        "chunk_ms": statistics.median(ms),
        "chunks_an_episode": len(ms) / len(own),
    }


def print_table(rows: Sequence[dict[str, Any]], episodes: int) -> None:
    """Print the rows as Markdown."""
    sys.stdout.write(
        f"{episodes} episodes\n\n| method | budget | success %, 95 % interval | points more than {FIRST} "
        "| a chunk ms | chunks an episode |\n| --- | --- | --- | --- | --- | --- |\n"
    )
    for row in rows:
        low, high = (100 * end for end in row["ci95"])
        success = f"{100 * row['success']:.1f} ({low:.1f} to {high:.1f})"
        versus = _points(row["versus_first"]) if row["versus_first"] else "-"
        figures = f"{versus} | {row['chunk_ms']:.1f} | {row['chunks_an_episode']:.1f}"
        sys.stdout.write(f"| `{row['method']}` | `{row['budget']}` | {success} | {figures} |\n")


def _points(versus: Mapping[str, Any]) -> str:
    """Return a difference in points with its interval; one episode has none."""
    if versus["ci95"] is None:
        return f"{100 * versus['mean']:.1f}"
    low, high = (100 * end for end in versus["ci95"])
    return f"{100 * versus['mean']:.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    sys.exit(main())
