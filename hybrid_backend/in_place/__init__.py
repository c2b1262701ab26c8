"""Serves decode steps, prompts and sliding windows on a CPU by attending pages where they lie in the host pool."""
