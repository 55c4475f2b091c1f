"""The gate: each engine beside the ONNX graph that it was built of, on the same inputs, refused where it differs.

`recording` runs the graphs and keeps what goes in and comes out of each; `comparing` gives that to the engines, one
after the other, and `texts` asks the whole chain. How much may differ stands in `limits`, with the reasons.
"""

from __future__ import annotations

PROMPT = "Describe the image."
"""What is asked where no question is given."""
