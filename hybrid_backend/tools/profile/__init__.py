"""``hybrid profile MODEL``: what a model's YAML should say, measured (docs/profile.md)."""
