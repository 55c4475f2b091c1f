"""OpenVINO on a CPU or a GPU of Intel."""
