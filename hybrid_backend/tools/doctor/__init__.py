"""`hybrid doctor`: whether this machine can serve, each finding with its fix (docs/doctor.md)."""
