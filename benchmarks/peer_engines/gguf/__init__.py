"""Writes a checkpoint's decoder and tower as llama.cpp's files."""
