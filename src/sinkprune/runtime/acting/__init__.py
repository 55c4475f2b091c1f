"""The steps of a robot policy: frames, instruction and state in, a chunk of actions out."""
