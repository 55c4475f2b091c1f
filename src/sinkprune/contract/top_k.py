"""How much TensorRT ranks at once: known to the export, which keeps within it, and to the check of graphs."""

MOST_OF_TOP_K = 3840
"""The largest K of a TopK (ITopKLayer, NvInfer.h of TensorRT 10)."""
