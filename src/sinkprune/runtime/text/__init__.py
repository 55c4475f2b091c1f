"""Chat templates, prompts, sampling and the text of answers."""
