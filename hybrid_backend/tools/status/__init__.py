"""The status page: a server's activity of the last minutes, from its own metrics.

`app` serves the page beside the server (`hybrid top`) or inside it (``app.StatusMiddleware``).
"""

MIDDLEWARE = "hybrid_backend.tools.status.app.StatusMiddleware"  # value of vLLM's flag --middleware
