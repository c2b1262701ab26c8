"""Models by name: a catalog of models that pip can fetch, and the resolution of a MODEL argument."""

from hybrid_backend.tools.hub.catalog import CatalogEntry, entries, find_entry
from hybrid_backend.tools.hub.fetch import fetch, models_dir
from hybrid_backend.tools.hub.reach import check_hub, hub_folder
from hybrid_backend.tools.hub.resolve import check_model, resolve_model

__all__ = [
    "CatalogEntry",
    "check_hub",
    "check_model",
    "entries",
    "fetch",
    "find_entry",
    "hub_folder",
    "models_dir",
    "resolve_model",
]
