"""Hybrid GPU-CPU attention with KV-cache offload for stock vLLM and SGLang.

Imports point one way: engines -> runtime -> methods -> (tiers, attention, workers) -> kernels.
"""

__version__ = "0.1.0"
