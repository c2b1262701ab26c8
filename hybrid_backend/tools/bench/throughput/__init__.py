"""``hybrid bench throughput``: stock and hybrid servers under the load of the engines' own benchmark clients."""
