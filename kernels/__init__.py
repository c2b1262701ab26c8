"""Kernels, installed as ``hybrid_backend.kernels``.

``operations`` is the contract of the operations that a decode step is made of. ``oracle``, ``cpu.operations`` and
``triton.operations`` implement it.
"""
