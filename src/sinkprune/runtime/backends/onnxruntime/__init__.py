"""ONNX Runtime on a CPU or a CUDA GPU."""
