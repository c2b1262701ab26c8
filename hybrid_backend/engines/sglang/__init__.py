"""SGLang: plugin, platform, KV pool, attention backend, lookahead hooks."""

BACKEND = "hybrid"
"""Name of our attention backend."""
OWN_BACKEND = "use SGLang's own attention backend for this model (`sglang serve`)"
"""The way out, in errors."""
