"""Kernels, installed as ``hybrid_backend.kernels``.

``reference`` is the oracle of every kernel; faster implementations sit beside it, one folder per target.
"""
