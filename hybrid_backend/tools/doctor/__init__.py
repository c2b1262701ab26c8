"""`hybrid doctor`: checks of this machine, each with a fix (docs/reference/doctor.md)."""
