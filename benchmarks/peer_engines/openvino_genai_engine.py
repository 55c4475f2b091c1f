"""OpenVINO GenAI's VLMPipeline, on what optimum-intel makes of the checkpoint."""

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
from sinkprune.contract.system.child_processes import find_program


@dataclass(frozen=True)
class _Way:
    """How a form is made, and what its activations are computed in."""

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
    """All precisions; with CDPruner where the model is of Qwen's."""
    need("openvino_genai", "openvino-genai")
    kind = config["model_type"]
    ways = tuple(_PRUNED) if kind.startswith("qwen") else ("none",)
    return [Form("openvino_genai", name, way.bits, ways) for name, way in _FORMS.items()]


def prepare(form: Form, place: Path) -> None:
    """Have optimum-cli convert, which is looked for beside this Python and then in PATH: it may be another venv's."""
    way = _FORMS[form.name]
    folder, partial = place / way.folder, place / f"{way.folder}.partial"
    if folder.exists():
        return
    program = shutil.which("optimum-cli", path=str(Path(sys.executable).parent)) or find_program("optimum-cli")
    if program is None:
        raise NotRunError("optimum-cli, of optimum-intel, is not in PATH; docs/peers.md says how to install it")
    shutil.rmtree(partial, ignore_errors=True)
    options = ["--task", "image-text-to-text", "--model", str(place / "checkpoint"), *way.export]
    # What this Python is to find is not what that one is.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([program, "export", "openvino", *options, str(partial)], check=False, env=environment)
    if done.returncode:
        raise NotRunError(
            f"optimum-cli export openvino {' '.join(way.export)} ended with {done.returncode}; see the log"
        )
    # GenAI looks for the picture's settings in this file alone, and takes others in silence where it is missing.
    shutil.copy(place / "checkpoint" / "preprocessor_config.json", partial)
    partial.rename(folder)


def load(form: Form, place: Path, threads: int) -> Loaded:
    """A pipeline on the CPU; caches of compiled models, prompts and pictures are left off, as they are by default."""
    import openvino
    import openvino_genai

    way = _FORMS[form.name]
    folder = place / way.folder
    settings = {"INFERENCE_PRECISION_HINT": way.compute, "INFERENCE_NUM_THREADS": threads}
    pipeline = openvino_genai.VLMPipeline(folder, "CPU", **settings)

    class Clock(openvino_genai.StreamerBase):  # type: ignore[misc]
        """When each token came."""

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
            """Nothing is held back."""

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
            raise NotRunError(f"{len(clock.times)} tokens came of {question.new_tokens} that were asked for")
        ttft = (clock.times[0] - start) * 1e3
        vision = metrics.get_prepare_embeddings_duration().mean
        return Timing(
            ttft,
            (clock.times[-1] - clock.times[0]) * 1e3 / max(1, question.new_tokens - 1),
            metrics.get_num_input_tokens(),
            clock.tokens,
            {"vision": vision, "prefill": ttft - vision},
        )

    names = ("openvino", "openvino-genai", "openvino-tokenizers")
    size = (folder / "openvino_language_model.bin").stat().st_size
    return Loaded(answer, {name: version(name) for name in names}, size)
