"""SGLang: plugin, platform, KV pool, attention backend, lookahead hooks."""

BACKEND = "hybrid"
OWN_BACKEND = "use SGLang's own attention backend for this model (`sglang serve`)"  # the way out, in errors
