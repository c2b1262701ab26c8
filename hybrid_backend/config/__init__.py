"""The YAML configuration.

`schema`, `sections` and `methods` declare the keys, `rules` what a value may be, and `load` reads files. `heads` reads
the JSON file that the key ``clo.heads`` names.
"""

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
from hybrid_backend.config.schema import MOST_FRAMES, HybridConfig, iter_keys
from hybrid_backend.config.sections import (
    HostPoolConfig,
    LookaheadConfig,
    MetricsConfig,
    ModelMatch,
    RecallConfig,
    SelectionConfig,
    WorkersConfig,
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
