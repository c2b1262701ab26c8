"""The status page: what the server does now and did in the last minutes, from its own metrics.

In the server's process (`app.StatusMiddleware`) or beside it (`sidecar`); both serve the same page and the same JSON.
"""

MIDDLEWARE = "hybrid_backend.tools.status.app.StatusMiddleware"  # of vLLM's flag --middleware
