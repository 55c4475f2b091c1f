"""ONNX graphs to engines: builds, TensorRT plugins and their kernels. May import `sinkprune` and its runtime."""
