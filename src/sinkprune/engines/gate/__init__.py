"""The gate: compares each engine with the ONNX graph that it was built from, and rejects engines that differ.

`recording` runs the graphs and stores inputs and outputs of each call. `comparing` runs the engines on the stored
inputs, and then the whole chain. `limits` has the allowed differences, with the reasons.
"""

from __future__ import annotations

PROMPT = "Describe the image."
"""The default question."""
