"""What answers are compared with: plain numpy, transformers, masks."""
