"""Builds engines from ONNX graphs; TensorRT plugins and their kernels; the gate."""
