"""Command ``hybrid plan``: predicts memory use and speed of each method before a start (docs/reference/plan.md)."""
