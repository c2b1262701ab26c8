"""Counters that the runtime updates, and their publication on the engine's /metrics."""
