"""`hybrid doctor`: checks of this machine, each with a fix (docs/doctor.md)."""
