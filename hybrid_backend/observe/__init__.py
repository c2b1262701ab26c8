"""Counters that the runtime keeps, and their way to the engine's /metrics."""
