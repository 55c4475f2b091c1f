"""The TensorRT plugins of domain `sinkprune`, their kernels, and the binaries of the kernels."""
