"""Measures how often the pocket robot picks the named object, by pruning method and budget, in closed-loop episodes.

    sinkprune-export demo/pocket-robot -o robot --max-images 2 --methods sinkpruner,random
    python benchmarks/robot/robot_success.py robot --episodes 500 --json success.json

With `--rows 72` the cameras see the upper 72 of 96 rows, and the bundle fills the rest with bars. Tables are then
those whose named object the table's camera sees whole.

Every method and budget sees the same tables and the same noise, so differences from the first method are paired by
episode. The robot runs four actions of a chunk, then looks again. An episode fails if the gripper closes on another
object, or on none within 40 steps. Ctrl-C keeps the episodes that every method and budget has run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from sinkprune import Policy
from sinkprune.calibration.evaluation.statistics import PictureBootstrap, wilson
from sinkprune.contract.checks import counted
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import write_json
from sinkprune.demo.robot_table import CANVAS, RADIUS, SIDE, RobotTable
from sinkprune.runtime.commands.interrupted import beside_earlier
from sinkprune.runtime.commands.reports import progress_bar
from sinkprune.runtime.processor import processor_name

FIRST = "sinkpruner"
"""The method that the others are compared with, at the same budget."""
RUN = 4
"""Actions of each chunk that the robot runs before it looks again."""
Plan = tuple[str, str]
"""A method and a budget."""


class Episode(NamedTuple):
    """What the robot did in one episode."""

    picked: bool
    """Whether it picked the named object."""
    chunk_ms: list[float]
    """The time of each chunk."""


@dataclass(frozen=True)
class _Options:
    bundle: Path
    episodes: int
    threads: int
    rows: int
    json: Path | None


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=SIDE)
    parser.add_argument("--json", type=Path)
    options = _Options(**vars(parser.parse_args(arguments)))
    policy = Policy.load(options.bundle, backend="ort-cpu", threads=options.threads)
    plans = [(FIRST, "none")]
    plans += [(method, budget) for method, own in policy.bundle.manifest.plans.items() for budget in own]
    episodes, interrupted, earlier = list[dict[Plan, Episode]](), "", ""
    seen = (number for number in count() if named_is_seen(number, options.rows))
    try:
        with progress_bar("acting", options.episodes * len(plans), "episodes") as done:
            for number in islice(seen, options.episodes):
                own = dict[Plan, Episode]()
                # Methods take turns, so that times are of the same minutes.
                for plan in plans:
                    own[plan] = run_episode(policy, number, *plan, options.rows)
                    done()
                episodes.append(own)
    except KeyboardInterrupt as interrupt:
        if not episodes:
            raise KeyboardInterrupt("no whole episode was measured, so nothing was kept.") from interrupt
        interrupted = f"the table counts the first {len(episodes)} of {counted(options.episodes, 'episode')}."
        options, earlier = beside_earlier(options, "json")
    rows = [_row(*plan, episodes) for plan in plans]
    print_table(rows, len(episodes))
    where = {"machine": processor_name(), "versions": dict(policy.backend.versions), "threads": options.threads}
    counts = {"episodes": len(episodes), "interrupted": interrupted or None}
    write_json(options.json, {**where, **counts, "rows": rows})
    if interrupted:
        raise KeyboardInterrupt(interrupted + earlier)


def named_is_seen(number: int, rows: int) -> bool:
    """Return whether the upper `rows` of the table's picture show the whole object that episode `number` names."""
    table = _table(number)
    return table.objects[table.target].y + RADIUS <= rows * CANVAS // SIDE


def _table(number: int) -> RobotTable:
    return RobotTable(f"test {number}")


def run_episode(policy: Policy, number: int, method: str, budget: str, rows: int = SIDE) -> Episode:
    """Return what the robot does in episode `number`, pruned, with cameras that see the upper `rows`."""
    table, chunk_ms = _table(number), list[float]()
    while not table.done:
        seed = 1000 * number + len(chunk_ms)
        cameras = [picture.crop((0, 0, SIDE, rows)) for picture in table.cameras()]
        report = policy.act(cameras, table.instruction, table.state(), method=method, budget=budget, seed=seed)
        chunk_ms.append(report.ms["latency"])
        for action in report.actions[:RUN]:
            if not table.done:
                table.step(action)
    return Episode(table.succeeded, chunk_ms)


def _row(method: str, budget: str, episodes: Sequence[Mapping[Plan, Episode]]) -> dict[str, Any]:
    """Return the figures of one row. Each of `episodes` has the results of all rows."""
    own, first = [each[method, budget] for each in episodes], (FIRST, budget)
    versus = None
    if first in episodes[0] and method != FIRST:
        difference = [int(its.picked) - int(each[first].picked) for its, each in zip(own, episodes, strict=True)]
        versus = asdict(PictureBootstrap([str(number) for number in range(len(own))])(difference))
    right, ms = sum(its.picked for its in own), [time for its in own for time in its.chunk_ms]
    return {
        "method": method,
        "budget": budget,
        "success": right / len(own),
        "ci95": wilson(right, len(own)),
        "versus_first": versus,
        "chunk_ms": statistics.median(ms),
        "chunks_an_episode": len(ms) / len(own),
    }


def print_table(rows: Sequence[dict[str, Any]], episodes: int) -> None:
    """Print the rows as Markdown."""
    sys.stdout.write(
        f"{counted(episodes, 'episode')}\n\n| method | budget | success %, 95 % interval | points more than {FIRST} "
        "| a chunk ms | chunks an episode |\n| --- | --- | --- | --- | --- | --- |\n"
    )
    for row in rows:
        low, high = (100 * end for end in row["ci95"])
        success = f"{100 * row['success']:.1f} ({low:.1f} to {high:.1f})"
        versus = _points(row["versus_first"]) if row["versus_first"] else "-"
        figures = f"{versus} | {row['chunk_ms']:.1f} | {row['chunks_an_episode']:.1f}"
        sys.stdout.write(f"| `{row['method']}` | `{row['budget']}` | {success} | {figures} |\n")


def _points(versus: Mapping[str, Any]) -> str:
    """Return a difference in points with its interval, which no single episode and no episodes all alike have."""
    if versus["ci95"] is None or versus["ci95"][0] == versus["ci95"][1]:
        return f"{100 * versus['mean']:.1f}"
    low, high = (100 * end for end in versus["ci95"])
    return f"{100 * versus['mean']:.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    sys.exit(main())
