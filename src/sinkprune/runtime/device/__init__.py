"""Times, and memory and streams of CUDA devices."""
