"""The training of the pocket model: its shape, its batches, its losses. `train_pocket_model.py` runs it."""
