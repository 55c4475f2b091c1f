"""Measures how often the pocket robot picks the named object while its table waits for nothing.

    sinkprune-export demo/pocket-robot -o robot --max-images 2
    python benchmarks/robot/robot_in_time.py robot --episodes 300 --json in-time.json --plot in-time.png

The table takes one action a tick, ten ticks a second, also while a chunk is computed. A chunk has eight actions and
arrives a given time after its frames. An episode fails if the gripper closes on another object, or on none within
four seconds. `wait` stands still until a chunk arrives, and runs four of its actions; the others are the ways to join
of `PolicyLoop`, with an execution horizon of four. A late chunk stops the gripper. All cells see the same tables, and
chunks with the same noise. Ctrl-C keeps the episodes that all cells have run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sinkprune import Policy
from sinkprune.calibration.evaluation.statistics import wilson
from sinkprune.contract.checks import counted
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import write_json, write_output
from sinkprune.demo.robot_table import RobotTable
from sinkprune.policies.loop import ActionPlan
from sinkprune.runtime.commands.interrupted import beside_earlier
from sinkprune.runtime.commands.reports import progress_bar
from sinkprune.runtime.processor import processor_name

RATE_HZ = 10
WAIT = "wait"
WAYS = (WAIT, "switch", "blend", "inpaint")
DELAYS_MS = (0, 100, 200, 300, 400, 600, 800)
HORIZON = 4
"""Ticks between the frames of two chunks, at least."""
STILL = np.zeros(3)


class Cell(NamedTuple):
    """A way to join chunks, the milliseconds of a chunk, and a budget."""

    way: str
    delay_ms: int
    budget: str

    @property
    def ticks(self) -> int:
        """The ticks between the frames of a chunk and its first action that can be sent."""
        return self.delay_ms * RATE_HZ // 1000


class Episode(NamedTuple):
    """What the robot did."""

    picked: bool
    ticks: int
    chunks: int


@dataclass(frozen=True)
class _Options:
    bundle: Path
    episodes: int
    threads: int
    json: Path | None
    plot: Path | None


class Tick(NamedTuple):
    """One tick of an episode."""

    thinks: bool
    """Whether a chunk is being computed."""
    acts: bool
    """Whether the tick had an action, and the gripper did not stand still."""
    chunks: int
    """The chunks so far."""
    age: float
    """The ticks since the frames behind the action; 0 without one."""


def played(policy: Policy, table: RobotTable, seed: int, cell: Cell, dies: float = math.inf) -> Iterator[Tick]:
    """Play an episode of a cell on `table`, one tick after the other, whose chunks begin with noise from `seed` on.

    The camera `dies` at that tick; no chunk begins from then on.
    """
    join: Any = "switch" if cell.way == WAIT else cell.way
    plan, chunks, tick, arrives, first, actions = ActionPlan(join), 0, 0, -1, -HORIZON, np.zeros((0, 3))
    while not table.done:
        rested = plan.coming(tick, 1) is None if cell.way == WAIT else tick >= first + HORIZON
        if arrives < 0 and rested and tick < dies:
            held = plan.coming(tick, cell.ticks) if cell.way == "inpaint" and cell.ticks else None
            given = table.cameras(), table.instruction, table.state()
            actions = policy.act(*given, budget=cell.budget, seed=seed + chunks, held=held).actions
            chunks, arrives, first = chunks + 1, tick + cell.ticks, tick
        if arrives == tick:
            alone = cell.way == WAIT or chunks == 1
            plan.add(actions[:HORIZON] if cell.way == WAIT else actions, tick if alone else first, first, tick)
            arrives = -1
        planned = plan.take(tick)
        table.step(STILL if planned is None else planned.action)
        yield Tick(arrives >= 0, planned is not None, chunks, 0.0 if planned is None else tick - planned.taken)
        tick += 1


def run_episode(policy: Policy, number: int, cell: Cell) -> Episode:
    """Return what the robot does in episode `number` of a cell."""
    table = RobotTable(f"test {number}")
    *_, last = played(policy, table, 1000 * number, cell)
    return Episode(table.succeeded, table.steps, last.chunks)


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--episodes", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = _Options(**vars(parser.parse_args(arguments)))
    policy = Policy.load(options.bundle, backend="ort-cpu", threads=options.threads)
    cells = [Cell(way, delay, "prune-80") for way in WAYS for delay in DELAYS_MS]
    cells += [Cell(way, 600, "none") for way in WAYS] + [Cell(way, 400, "prune-66.7") for way in WAYS]
    episodes, interrupted, earlier = list[dict[Cell, Episode]](), "", ""
    try:
        with progress_bar("acting", options.episodes * len(cells), "episodes") as count:
            for number in range(options.episodes):
                own = dict[Cell, Episode]()
                for cell in cells:
                    own[cell] = run_episode(policy, number, cell)
                    count()
                episodes.append(own)
    except KeyboardInterrupt as interrupt:
        if not episodes:
            raise KeyboardInterrupt("no whole episode was measured, so nothing was kept.") from interrupt
        interrupted = f"the table counts the first {len(episodes)} of {counted(options.episodes, 'episode')}."
        options, earlier = beside_earlier(options, "json", "plot")
    rows = [_row(cell, [own[cell] for own in episodes]) for cell in cells]
    print_tables(rows, len(episodes))
    where = {"machine": processor_name(), "versions": dict(policy.backend.versions), "threads": options.threads}
    counts = {"episodes": len(episodes), "interrupted": interrupted or None, "rate_hz": RATE_HZ}
    write_json(options.json, {**where, **counts, "rows": rows})
    if options.plot:
        write_output(options.plot, plot(rows, options.plot.suffix))
    if interrupted:
        raise KeyboardInterrupt(interrupted + earlier)


def _row(cell: Cell, episodes: Sequence[Episode]) -> dict[str, Any]:
    right = sum(own.picked for own in episodes)
    picks = [own.ticks / RATE_HZ for own in episodes if own.picked]
    return {
        **cell._asdict(),
        "success": right / len(episodes),
        "ci95": wilson(right, len(episodes)),
        "seconds_to_pick": statistics.median(picks) if picks else None,
        "chunks_an_episode": sum(own.chunks for own in episodes) / len(episodes),
    }


def print_tables(rows: Sequence[dict[str, Any]], episodes: int) -> None:
    """Print success and the seconds to the pick as Markdown, a row for each time of a chunk and budget."""
    sys.stdout.write(f"{counted(episodes, 'episode')} a cell\n")
    heads = " | ".join(f"`{way}`" for way in WAYS)
    times = list(dict.fromkeys((row["delay_ms"], row["budget"]) for row in rows))
    for what, shown in (("success %, 95 % interval", _success), ("s to the pick, median", _seconds)):
        sys.stdout.write(f"\n{what}:\n\n| a chunk takes, ms | budget | {heads} |\n{'| --- ' * (2 + len(WAYS))}|\n")
        for time in times:
            # The rows are in the order of the ways.
            own = [shown(row) for row in rows if (row["delay_ms"], row["budget"]) == time]
            sys.stdout.write(f"| {time[0]} | `{time[1]}` | {' | '.join(own)} |\n")


def _success(row: dict[str, Any]) -> str:
    low, high = (100 * end for end in row["ci95"])
    return f"{100 * row['success']:.1f} ({low:.1f} to {high:.1f})"


def _seconds(row: dict[str, Any]) -> str:
    return "-" if row["seconds_to_pick"] is None else f"{row['seconds_to_pick']:.1f}"


def plot(rows: Sequence[dict[str, Any]], suffix: str) -> bytes:
    """Return the bytes of a picture file: success, and seconds to the pick, against the time of a chunk."""
    from io import BytesIO

    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes: Any = figure.subplots(1, 2)
    for way in WAYS:
        own = [row for row in rows if row["way"] == way and row["budget"] == "prune-80"]
        ms, success = [row["delay_ms"] for row in own], [100 * row["success"] for row in own]
        ends = np.array(
            [[100 * (row["success"] - row["ci95"][0]), 100 * (row["ci95"][1] - row["success"])] for row in own]
        )
        axes[0].errorbar(ms, success, yerr=ends.T.clip(0), marker="o", capsize=3, label=way)
        picked = [row for row in own if row["seconds_to_pick"] is not None and row["success"] > 0.1]
        shown, seconds = ([row[name] for row in picked] for name in ("delay_ms", "seconds_to_pick"))
        axes[1].plot(shown, seconds, marker="o", label=way)
    axes[0].set(xlabel="time of a chunk, ms", ylabel="success, % (95 % interval)", ylim=(0, 103))
    axes[1].set(xlabel="time of a chunk, ms", ylabel="seconds to the pick, median", ylim=(0, None))
    axes[0].legend(title="a new chunk joins by")
    figure.suptitle("The pocket robot at 10 actions a second, prune-80: its table waits for nothing")
    out = BytesIO()
    figure.savefig(out, format=suffix.lstrip(".") or "png", dpi=110)
    return out.getvalue()


if __name__ == "__main__":
    sys.exit(main())
