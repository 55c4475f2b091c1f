"""`sinkprune-profile`: every budget against the unpruned engines."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.command import run_command
from sinkprune.contract.report import OF_TTFT, BudgetReport, Report, Spread
from sinkprune.contract.terminal import escaped
from sinkprune.runtime.commands import (
    add_report_options,
    check_report_options,
    load_pipeline,
    new_parser,
    open_bundle,
    picture_files,
    plain,
    prompt_pieces,
    read_pictures,
    write_report,
)
from sinkprune.runtime.commands.memory import Planned, check_memory
from sinkprune.runtime.plot import plot_report
from sinkprune.runtime.profile import REPEAT, WARMUP, profile
from sinkprune.runtime.request import MAX_NEW_TOKENS

_EXAMPLES = """\
examples:
  sinkprune-profile bundle --image photo.jpg --prompt "What is on the table?"
  sinkprune-profile bundle --image photo.jpg --prompt "Is the door open?" --budgets none,retain-64 \\
      --new-tokens 32 --repeat 10 --json profile.json --plot profile.png
"""


# Wider than most terminals are set to by default: a wrapped row is worse than a long one.
_TABLE_WIDTH = 250


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_command(_profile, arguments)


def _profile(arguments: Sequence[str] | None) -> None:
    parser = new_parser(
        "sinkprune-profile",
        "Measure every budget against the unpruned engines, in turn, on one image and prompt.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("--budgets", help="comma-separated, none included (default: all of the bundle)")
    add("--new-tokens", type=MAX_NEW_TOKENS, default=16, help="length of every answer (default: 16)")
    add("--repeat", type=REPEAT, default=5, help="measured rounds (default: 5)")
    add("--warmup", type=WARMUP, default=1, help="rounds before them that do not count (default: 1)")
    add_report_options(parser, "where the time goes")
    options = parser.parse_args(arguments)

    check_report_options(options, picture_files(options))
    prompt = prompt_pieces(options.prompt)
    budgets = [name.strip() for name in (options.budgets or "").split(",") if name.strip()]
    bundle = open_bundle(options, budgets)
    budgets = budgets or [UNPRUNED, *bundle.manifest.plans[options.method]]
    images = read_pictures(options, bundle)
    check_memory(options, bundle, Planned(images, options.method, [UNPRUNED, *budgets], prompt, options.new_tokens))
    pipeline = load_pipeline(options, bundle)

    console = Console(stderr=True)
    columns = [
        TextColumn("{task.description:<12}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    ]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        runs = len({UNPRUNED, *budgets}) * (options.warmup + options.repeat)
        task = progress.add_task("measuring", total=runs)
        report = profile(
            pipeline,
            images,
            prompt,
            budgets,
            method=options.method,
            new_tokens=options.new_tokens,
            repeat=options.repeat,
            warmup=options.warmup,
            on_run=lambda name: progress.update(task, advance=1, description=escaped(name)),
        )
    write_report(options, report, plot_report)
    # Last, because whoever reads it may stop reading, as `head` does.
    _print_table(report)


def _print_table(report: Report) -> None:
    console = Console(width=_TABLE_WIDTH, soft_wrap=True)
    console.print(
        f"{escaped(report.model)}, {report.precision}, {report.backend}, {report.threads} threads, {report.machine}\n"
        f"{report.prompt_tokens} text tokens, {report.new_tokens} new tokens; milliseconds, median (p95) of "
        f"{report.repeat} interleaved runs",
        highlight=False,
        markup=False,
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    headings = ["budget", "visual", "mean %", "TTFT", "vision", "prefill", "select", "a token", "latency", "KV MB"]
    for heading in [*headings, "prefill x", "by FLOPs", "eff.", "TTFT x"]:
        table.add_column(heading, justify="left" if heading == "budget" else "right", no_wrap=True)
    for name, budget in report.budgets.items():
        ms = budget.ms
        table.add_row(
            plain(name),
            f"{budget.visual_tokens}>{budget.kept_after_sanitizer}>{budget.tokens_per_layer[-1]}",
            f"{100 * budget.mean_visual_tokens / budget.visual_tokens:.1f}",
            _with_p95(ms["ttft"]),
            _median(ms["vision"]),
            _with_p95(ms["prefill"]),
            *(_median(ms[part]) for part in ("select", "per_token", "latency")),
            f"{budget.kv_bytes / 1e6:.1f}",
            f"{budget.speedup.prefill:.2f}",
            f"{budget.flops_speedup.prefill:.2f}",
            f"{budget.efficiency.prefill:.2f}",
            f"{budget.speedup.ttft:.2f}",
        )
    console.print(table)
    for name, budget in report.budgets.items():
        console.print(plain(f"{name}: TTFT is {_parts(budget)}; {_rates(budget)}"))
    for name, budget in report.budgets.items():
        if budget.stage_peak_rss_bytes:
            console.print(plain(f"{name}: peak memory in MB: {_peaks(budget)}"))
    if report.load_ms is not None and report.first_answer_ms is not None:
        console.print(f"loaded in {report.load_ms:.0f} ms, the first answer began at {report.first_answer_ms:.0f} ms")


def _parts(budget: BudgetReport) -> str:
    """What the time to the first token is made of, in milliseconds."""
    parts = [f"{part} {_median(budget.ms[part])}" for part in OF_TTFT]
    return " + ".join(parts).replace(" + rest", f" (select {_median(budget.ms['select'])} of it) + rest")


def _rates(budget: BudgetReport) -> str:
    """What the machine achieved: no figure here may beat its peak."""
    prefill = budget.ms["prefill"]
    rates = [f"prefill {budget.flops.prefill / prefill.median / 1e6:.0f} GFLOP/s"] if prefill else []
    if budget.decode_tokens_per_s is not None:
        rates.append(f"decode {budget.decode_tokens_per_s:.1f} tokens/s, {budget.decode_gb_per_s:.1f} GB/s")
    return ", ".join(rates)


def _peaks(budget: BudgetReport) -> str:
    """The memory each stage of the first run reached, and all runs."""
    stages = ", ".join(f"{stage} {count / 1e6:.0f}" for stage, count in budget.stage_peak_rss_bytes.items())
    return stages if budget.peak_rss_bytes is None else f"{stages}; in all {budget.peak_rss_bytes / 1e6:.0f}"


def _median(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.{_digits(spread)}f}"


def _with_p95(spread: Spread | None) -> str:
    return "-" if spread is None else f"{_median(spread)} ({spread.p95:.{_digits(spread)}f})"


def _digits(spread: Spread) -> int:
    return 0 if spread.median >= 100 else 1
