"""Stand-ins for hardware and systems that are not there."""
