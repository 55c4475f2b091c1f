"""`sinkprune`: every command as a verb. `sinkprune-run` is the same as `sinkprune run`, and so are the others."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sinkprune.contract.command_line.options import Verb, run_verb
from sinkprune.contract.registry import Registry

RUN = Verb("sinkprune.runtime.commands.run", "answer a question about pictures or a video")
ACT = Verb("sinkprune.policies.act", "return a robot policy's next actions")
REPLAY = Verb("sinkprune.jetson.replay", "answer a question about a recording of ROS 2")
SERVE = Verb("sinkprune.serving.command", "answer requests of other programs over HTTP")
PROFILE = Verb("sinkprune.runtime.commands.profile", "measure the time of every budget")
EXPORT = Verb("sinkprune.export.command", "turn a checkpoint into a bundle")
BUILD = Verb("sinkprune.engines.command", "compile a bundle into engines")
CHECK = Verb("sinkprune.engines.gate.command", "compare engines with the graphs they were built from")
EVALUATE = Verb("sinkprune.calibration.commands.evaluate", "measure the accuracy of every method and budget")
CALIBRATE = Verb("sinkprune.calibration.commands.calibrate", "measure a model on your pictures, and quantise it")
DOCTOR = Verb("sinkprune.jetson.doctor", "report what this machine is, and which models fit")

VERBS = Registry[Verb]("sinkprune.commands")
"""Every command that an installed package registers, by its verb."""
_DESCRIPTION = "Prune visual tokens inside the decoder of multimodal LLMs, on exported graphs or engines."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `sinkprune` with `arguments` (default: those of the process); returns the exit code."""
    return run_verb("sinkprune", _DESCRIPTION, VERBS, sys.argv[1:] if arguments is None else arguments)
