"""Benchmarks: run by hand or by make, never by the tests. They print what they measured, the losing points too."""
