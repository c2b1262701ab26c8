"""Command ``hybrid plan``: predicts memory use and speed of each method before a server is started (docs/reference/plan.md)."""
