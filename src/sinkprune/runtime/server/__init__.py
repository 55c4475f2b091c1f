"""The HTTP server of `sinkprune-serve`: OpenAI's chat completions, answered by one pipeline."""
