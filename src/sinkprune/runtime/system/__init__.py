"""This machine as the runtime uses it: cores, heap, processor, locks."""
