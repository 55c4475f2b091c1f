"""The demonstration: a small model, drawn scenes and photos, on which to try pruning."""
