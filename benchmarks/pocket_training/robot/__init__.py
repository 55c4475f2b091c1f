"""The parts of the training of the pocket robot."""
