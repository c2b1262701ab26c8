"""The YAML configuration: `schema` says what may be written, `rules` what a value may be, `load` reads it; `heads`:
the JSON file beside it."""

from hybrid_backend.config.heads import HeadScores, read_heads
from hybrid_backend.config.load import (
    DEFAULT_FILE,
    ENV_CONFIG,
    apply_overrides,
    config_from_mapping,
    find_config,
    load_config,
    load_mapping,
    parse_override,
    resolve_config,
    shipped_configs,
    source_of,
)
from hybrid_backend.config.rules import Rule, format_size, parse_size
from hybrid_backend.config.schema import (
    MOST_FRAMES,
    HostPoolConfig,
    HybridConfig,
    LookaheadConfig,
    MetricsConfig,
    ModelMatch,
    RecallConfig,
    SelectionConfig,
    WorkersConfig,
    iter_keys,
)

__all__ = [
    "DEFAULT_FILE",
    "ENV_CONFIG",
    "MOST_FRAMES",
    "HeadScores",
    "HostPoolConfig",
    "HybridConfig",
    "LookaheadConfig",
    "MetricsConfig",
    "ModelMatch",
    "RecallConfig",
    "Rule",
    "SelectionConfig",
    "WorkersConfig",
    "apply_overrides",
    "config_from_mapping",
    "find_config",
    "format_size",
    "iter_keys",
    "load_config",
    "load_mapping",
    "parse_override",
    "parse_size",
    "read_heads",
    "resolve_config",
    "shipped_configs",
    "source_of",
]
