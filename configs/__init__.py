"""The shipped configurations, one YAML per model; installed as `hybrid_backend.configs`."""
