"""The steps of a request, from pictures and texts to tokens."""
