"""The gate: compares each engine with the ONNX graph that it was built from, and rejects engines that differ.

`recording` stores the calls of the graphs. `comparing` runs the engines on them, and then the whole chain. `report`
has the allowed differences.
"""

from __future__ import annotations

PROMPT = "Describe the image."
"""The default question."""
