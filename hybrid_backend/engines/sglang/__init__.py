"""SGLang: plugin, platform, KV pool, attention backend, lookahead hooks."""

BACKEND = "hybrid"
"""Name of our attention backend."""
OWN_BACKEND = "use SGLang's own attention backend for this model (`sglang serve`)"
"""Advice in error messages: how to serve without this plugin."""
