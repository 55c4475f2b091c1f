"""The parts of `figures.py`: the commands of each measurement, and the tables that show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from figure_tables import (
    Figures,
    kinds,
    methods_full,
    paired,
    peers_short,
    robot_paired,
    robot_success,
    robot_times,
    savings_full,
    savings_short,
    ttft_full,
    versus_full,
)


class Part(NamedTuple):
    """What one run measures, and the tables that show it."""

    commands: tuple[str, ...]
    """Shell words; `{work}` is a folder for bundles, `{json}` the file that the last command writes."""
    tables: Mapping[str, Callable[[Figures], str]]
    """The text of each table, by the name in its marker."""
    by_default: bool = True
    methods: tuple[str, ...] = ()
    """The methods whose rows can be measured alone, in order. The last command is then `sinkprune-evaluate`."""
    plot: str = ""
    """The path of `{plot}`, the picture of such rows."""


METHODS = (
    "sinkpruner,downsample,sinkpruner-text,random,uniform,fastervlm,visionzip,visionzip+filter,"
    "divprune,dart,cdpruner,mmtok,prunesid,vispruner,scope,vscan,fastv,sparsevlm,"
    "sinkpruner-no-sanitizer,sinkpruner-no-text-pruner,"
    "sinkpruner-no-diversity,sinkpruner-no-outlier-removal,sinkpruner-no-aggregation,"
    "sinkpruner-paper,sinkpruner+centred,divprune+centred,cdpruner+centred,tops"
)
_VARIED = (
    "sinkpruner,downsample,downsample-ttft,sinkpruner-text,random,uniform,"
    "fastervlm,visionzip,visionzip+filter,divprune,dart,cdpruner,mmtok,prunesid,vispruner,scope,vscan,"
    "fastv,sparsevlm,sinkpruner-no-text-pruner,sinkpruner-no-outlier-removal,sinkpruner-no-diversity,"
    "sinkpruner-paper,tops"
)
_ROBOT = (
    "sinkpruner,downsample,sinkpruner-text,sinkpruner-no-text-pruner,sinkpruner-no-outlier-removal,sinkpruner-no-diversity,"
    "random,uniform,divprune,fastervlm,visionzip,dart,vispruner,cdpruner,vscan,mmtok,prunesid,scope,fastv"
)
_FP32 = " --backend ort-cpu --threads 1"
"""Other backends have their vision tower in bf16 where the processor has it. For so small a model, two threads take
longer than one."""
_KINDS = (
    ("downsample", "retain-32"),
    ("sinkpruner", "retain-128"),
    ("sinkpruner", "retain-64"),
    ("sinkpruner", "retain-32"),
    ("dart", "retain-32"),
    ("visionzip", "retain-32"),
    ("random", "retain-32"),
)
_VARIED_KINDS = [
    (method, "prune-77.8")
    for method in [
        "downsample",
        "sinkpruner",
        "sinkpruner-text",
        "sinkpruner-no-text-pruner",
        "cdpruner",
        "dart",
    ]
]
_TUNED = (
    "sinkpruner,downsample,sinkpruner-no-outlier-removal,sinkpruner-no-aggregation,sinkpruner-no-diversity,"
    "sinkpruner-no-text-pruner,visionzip,visionzip+filter,fastervlm,divprune,dart,vispruner,random"
)
PARTS = {
    "savings": Part(
        (
            "sinkprune-export llava-1.1b --random-weights --weights int4 -o {work}/llava-1.1b --force",
            "python demo/photo.py {work}/coffee.jpg",
            "sinkprune-profile {work}/llava-1.1b --image {work}/coffee.jpg "
            "--prompt 'What is in the cup, and what lies on the saucer?' "
            "--repeat 9 --new-tokens 16 --json {json} --plot docs/profile.png",
        ),
        {"savings": savings_short, "savings-in-full": savings_full},
    ),
    "methods": Part(
        (
            f"sinkprune-export demo/pocket -o {{work}}/methods --force --methods {METHODS}",
            "sinkprune-evaluate {work}/methods --json {json} --plot {plot}" + _FP32,
        ),
        {
            "methods": methods_full,
            "methods-versus": versus_full,
            "methods-ttft": ttft_full,
            "methods-kinds": partial(kinds, columns=_KINDS),
        },
        by_default=False,
        methods=tuple(METHODS.split(",")),
        plot="docs/accuracy.png",
    ),
    "varied": Part(
        (
            f"sinkprune-export demo/pocket-qwen3 -o {{work}}/varied --force --methods {_VARIED} "
            "--budgets prune-66.7,prune-77.8,prune-88.9",
            "sinkprune-evaluate {work}/varied --data varied-scenes --json {json} --plot {plot}" + _FP32,
        ),
        {
            "varied": methods_full,
            "varied-versus": versus_full,
            "varied-ttft": ttft_full,
            "varied-kinds": partial(kinds, columns=_VARIED_KINDS),
        },
        by_default=False,
        methods=tuple(_VARIED.split(",")),
        plot="docs/measurements/accuracy-qwen3.png",
    ),
    "outliers": Part(
        (
            "python benchmarks/train_pocket_model.py {work}/pocket-tuned --state {work}/tuned.pt "
            "--model llava-outliers --threads 1",
            f"sinkprune-export {{work}}/pocket-tuned -o {{work}}/tuned --force --methods {_TUNED} "
            "--budgets retain-64,retain-32",
            "sinkprune-calibrate norms {work}/tuned --json {work}/norms.json --plot docs/norms-tuned.png",
            "sinkprune-calibrate attention {work}/tuned --threads 1 --limit 200 --budgets retain-64,retain-32 "
            "--methods sinkpruner,sinkpruner-no-outlier-removal,fastervlm,visionzip --json {work}/attention.json",
            "sinkprune-evaluate {work}/tuned --json {json} --answers {work}/outliers.jsonl" + _FP32,
        ),
        {"outliers": paired},
        by_default=False,
    ),
    "planted": Part(
        (
            "sinkprune-export demo/pocket -o {work}/planted --force --budgets retain-64,retain-32 "
            "--methods sinkpruner,downsample,sinkpruner-no-outlier-removal,dart,visionzip+filter,visionzip,fastervlm,"
            "divprune,random",
            "sinkprune-evaluate {work}/planted --plant-outliers --json {json}" + _FP32,
        ),
        {"planted": paired},
        by_default=False,
    ),
    "robot": Part(
        (
            f"sinkprune-export demo/pocket-robot -o {{work}}/robot --force --max-images 2 --methods {_ROBOT}",
            "python benchmarks/robot/robot_success.py {work}/robot --episodes 500 --json {json}",
        ),
        {"robot-success": robot_success, "robot-paired": robot_paired, "robot-times": robot_times},
        by_default=False,
    ),
    "oft": Part(
        (
            "sinkprune-export demo/pocket-oft -o {work}/oft --force --max-images 2 --chunk 8 --bounds q01-q99 "
            "--methods sinkpruner,random,downsample,divprune,cdpruner",
            "python benchmarks/robot/robot_success.py {work}/oft --episodes 500 --json {json}",
        ),
        {"oft-success": robot_success, "oft-paired": robot_paired, "oft-times": robot_times},
        by_default=False,
    ),
    "peers": Part(
        (
            "python benchmarks/peers.py --folder {work}/peers --json {json} --plot docs/peers.png --repeat 9 "
            "--only 'openvino-genai int4-sym,sinkprune ort-cpu+openvino int4,llama-cpp Q4_0'",
        ),
        {"peers": peers_short},
        by_default=False,
    ),
}
