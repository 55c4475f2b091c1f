"""Files and folders: written whole or not at all, opened once, summed, signed, read without trust."""
