"""``hybrid bench throughput``: serving throughput and latency of OpenAI-compatible endpoints, by request rate."""
