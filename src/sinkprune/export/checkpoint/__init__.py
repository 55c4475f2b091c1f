"""Checkpoints in Hugging Face format: configuration, tensors, tokenizer."""
