"""A checkpoint as llama.cpp's files: its decoder and its tower."""
