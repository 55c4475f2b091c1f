"""OpenVINO GenAI's VLMPipeline, on the checkpoint converted by optimum-intel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peer_engines.checkpoint import chat_text, random_picture
from peer_engines.engine import Form, Loaded, NotRunError, Question, Timing, need
from sinkprune.contract.child_processes import find_program


@dataclass(frozen=True)
class _Way:
    """The export of a form, and the precision of its activations."""

    bits: float
    folder: str
    export: tuple[str, ...]
    compute: str


_FORMS = {
    "fp32": _Way(16, "openvino-fp16", ("--weight-format", "fp16"), "f32"),
    "bf16": _Way(16, "openvino-fp16", ("--weight-format", "fp16"), "bf16"),
    "int8": _Way(8, "openvino-int8", ("--weight-format", "int8"), "bf16"),
    # Two of many: optimum's own choice, zero points in groups of 128; and the same without zero points.
    "int4": _Way(4, "openvino-int4", ("--weight-format", "int4"), "bf16"),
    "int4-sym": _Way(4, "openvino-int4-sym", ("--weight-format", "int4", "--sym", "--group-size", "128"), "bf16"),
}
_NATIVE_TAG = "<ov_genai_image_0>"
_PRUNED = {"none": 0, "cdpruner-50": 50, "cdpruner-75": 75, "cdpruner-90": 90}
"""Per cent of the visual tokens that CDPruner drops; GenAI has it for Qwen-VL, and ignores it for LLaVA."""


def forms(config: Mapping[str, Any]) -> Sequence[Form]:
    """Return all precisions, with CDPruner for Qwen's models."""
    need("openvino_genai", "openvino-genai")
    kind = config["model_type"]
    if kind == "pi0":
        raise NotRunError("it runs no policies")
    ways = tuple(_PRUNED) if kind.startswith("qwen") else ("none",)
    return [Form("openvino_genai", name, way.bits, ways) for name, way in _FORMS.items()]


def prepare(form: Form, place: Path) -> None:
    """Run optimum-cli, from this Python's environment or else from PATH, where another environment may have it."""
    way = _FORMS[form.name]
    folder, partial = place / way.folder, place / f"{way.folder}.partial"
    if folder.exists():
        return
    program = shutil.which("optimum-cli", path=str(Path(sys.executable).parent)) or find_program("optimum-cli")
    if program is None:
        raise NotRunError("optimum-cli, of optimum-intel, is not in PATH; docs/peers.md says how to install it")
    shutil.rmtree(partial, ignore_errors=True)
    options = ["--task", "image-text-to-text", "--model", str(place / "checkpoint"), *way.export]
    # The converter is another environment with packages of its own.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([program, "export", "openvino", *options, str(partial)], check=False, env=environment)
    if done.returncode:
        raise NotRunError(
            f"optimum-cli export openvino {' '.join(way.export)} ended with {done.returncode}; see the log"
        )
    # GenAI reads the picture's settings from this file only, and silently uses defaults without it.
    shutil.copy(place / "checkpoint" / "preprocessor_config.json", partial)
    partial.rename(folder)


def load(form: Form, place: Path, threads: int) -> Loaded:
    """Load a pipeline on the CPU; caches of compiled models, prompts and pictures are off, the default."""
    import openvino
    import openvino_genai

    way = _FORMS[form.name]
    folder = place / way.folder
    settings = {"INFERENCE_PRECISION_HINT": way.compute, "INFERENCE_NUM_THREADS": threads}
    pipeline = openvino_genai.VLMPipeline(folder, "CPU", **settings)

    class Clock(openvino_genai.StreamerBase):  # type: ignore[misc]
        """Records the time of each token."""

        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []
            self.tokens: list[int] = []

        def write(self, token: int | list[int]) -> openvino_genai.StreamingStatus:
            came = token if isinstance(token, list) else [token]
            self.tokens += came
            self.times += [time.perf_counter()] * len(came)
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """Do nothing."""

    def answer(question: Question) -> Timing:
        picture = openvino.Tensor(random_picture(question.seed, question.side))
        config = openvino_genai.GenerationConfig(
            max_new_tokens=question.new_tokens,
            min_new_tokens=question.new_tokens,
            ignore_eos=True,
            do_sample=False,
            apply_chat_template=False,
        )
        if len(form.ways) > 1:
            config.pruning_ratio = _PRUNED[question.way]
        text = chat_text(place / "checkpoint", question.text, _NATIVE_TAG)
        clock, start = Clock(), time.perf_counter()
        result = pipeline.generate(text, images=[picture], generation_config=config, streamer=clock)
        metrics = result.perf_metrics
        if len(clock.times) != question.new_tokens:
            raise NotRunError(f"{len(clock.times)} tokens came, expected {question.new_tokens}")
        vision_ms = metrics.get_prepare_embeddings_duration().mean
        return Timing.of(start, clock.times, vision_ms, metrics.get_num_input_tokens(), clock.tokens)

    names = ("openvino", "openvino-genai", "openvino-tokenizers")
    size = (folder / "openvino_language_model.bin").stat().st_size
    return Loaded(answer, {name: version(name) for name in names}, size)
