"""The accuracy that a bundle keeps: its answers to a task's questions, with every method and budget."""
