"""Runs a bundle: loads its engines, chains them, generates and measures. Needs no torch, transformers or onnx."""
