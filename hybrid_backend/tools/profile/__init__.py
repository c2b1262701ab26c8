"""Command ``hybrid profile MODEL``: measures a model and writes a configuration for it (docs/lab/profile.md)."""
