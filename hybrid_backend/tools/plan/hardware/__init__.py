"""Measuring a machine: `hybrid profile --hardware`."""
