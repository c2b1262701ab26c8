"""SGLang: plugin, platform, KV pool, attention backend, lookahead hooks."""

BACKEND = "hybrid"
