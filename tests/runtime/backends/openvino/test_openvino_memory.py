"""What OpenVINO leaves in memory: little for new sizes of inputs, and little of a pipeline that is gone."""

from __future__ import annotations

import os
import subprocess
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.child_processes import python_command
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.openvino.backend import OpenVinoBackend
from sinkprune.runtime.system import trim_heap

SIZES = 150
MOST_BYTES = 60e6
"""After half of the sizes it grows by some MB; where OpenVINO keeps what it does by itself, by 200."""


def resident_bytes() -> int:
    trim_heap()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_prompts_of_many_lengths_leave_little_behind(bundle: Callable[..., Path]) -> None:
    opened = read_bundle(bundle("gqa-112"))
    model = Model.of_bundle(opened, "decoder_0")
    segment = OpenVinoBackend("openvino", 1, "fastest").load_decoder(model, opened.manifest.cache, lambda own: own)

    def ask(rows: int) -> None:
        inputs = {tensor.name: [1, rows, tensor.shape[2]] for tensor in model.spec.inputs if len(tensor.shape) == 3}
        segment({name: np.zeros(shape, np.float32) for name, shape in inputs.items()}, segment.new_cache())

    lengths = np.random.default_rng(0).permutation(np.arange(1, 2 * SIZES)).tolist()
    ask(2 * SIZES)
    for rows in lengths[:SIZES]:
        ask(rows)
    before = resident_bytes()
    for rows in lengths[SIZES:]:
        ask(rows)
    grown = resident_bytes() - before
    assert grown < MOST_BYTES, grown


def test_a_decoder_that_nobody_holds_is_freed(bundle: Callable[..., Path]) -> None:
    backend = OpenVinoBackend("openvino", 1, "fastest")
    model = Model.of_bundle(read_bundle(bundle("gqa-112")), "decoder_0")
    decoder = backend.load_decoder(model, "in-place", lambda own: own)
    held = [weakref.ref(each) for each in (backend, decoder)]
    del backend, decoder
    # At once, not when Python collects garbage: a robot may have no memory for two models.
    assert [each() for each in held] == [None, None]


def test_a_signal_after_two_pipelines_are_gone_is_handled(bundle: Callable[..., Path]) -> None:
    """OpenVINO's plugin has a stack for signals of its own, and restores the one that it found."""
    program = (
        "import os, signal, sys; from sinkprune import Pipeline; "
        "first, second = (Pipeline.load(sys.argv[1], backend='openvino') for _ in range(2)); "
        "signal.signal(signal.SIGINT, lambda *given: print('handled')); "
        "del first; del second; os.kill(os.getpid(), signal.SIGINT)"
    )
    command = python_command(program, str(bundle("gqa-112")))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr
