"""Kernels, installed as ``hybrid_backend.kernels``.

``operations`` says what a decode step is made of; ``oracle``, ``cpu.operations`` and ``triton.operations`` do it.
"""
