"""SGLang 0.5.23: plugin, platform, KV pool, attention backend, lookahead hooks."""

SGLANG_VERSION = "0.5.23"
BACKEND = "hybrid"
