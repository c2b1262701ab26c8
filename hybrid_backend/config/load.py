"""Reader of configurations from files, flags and the environment. Each mistake is an error of one line."""

from __future__ import annotations

import copy
import importlib.resources
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import BaseModel, ValidationError

from hybrid_backend.config.paths import user_path
from hybrid_backend.config.reading import read_text, reading
from hybrid_backend.config.rules import (
    did_you_mean,
    fail,
    show,
)
from hybrid_backend.config.schema import HybridConfig, iter_keys, section_of

ENV_CONFIG = "HYBRID_CONFIG"
DEFAULT_FILE = "default.yaml"
MOST_ALIASES = 16
"""Limit of aliases (``*name``) in one YAML text. Sixteen aliases repeat a value 400 times at most."""
MOST_DEPTH = 32
"""Limit of nested brackets in one YAML text, because PyYAML's time grows with their square."""
MOST_BYTES = 1 << 17
"""Size limit of a configuration file in bytes; PyYAML reads as much in seconds."""


def _unknown_key(path: Sequence[str]) -> str:
    """Describe a dotted path that is no key, with the key that was probably meant."""
    model: type[BaseModel] = HybridConfig
    depth = 0
    while depth < len(path) - 1 and (section := section_of(model.model_fields.get(path[depth]))):
        model, depth = section, depth + 1
    is_plain_key = depth < len(path) - 1 and path[depth] in model.model_fields  # The component is a key, not a section.
    prefix, word = ".".join(path[:depth]), path[depth + is_plain_key]
    moved = [key for key, _ in iter_keys() if key.rpartition(".")[2] == path[-1]]
    hint = f"did you mean {' or '.join(moved)}?" if moved else did_you_mean(path[depth], list(model.model_fields))
    if not hint:
        hint = f"{prefix or 'the top level'} has the keys {', '.join(model.model_fields)}"
    return f"{'.'.join(path)}: unknown key {show(word)}; {hint}"


def _explain(error: Mapping[str, Any]) -> tuple[str, str]:
    """Return the key path and the one-line reason of one pydantic error."""
    path = [str(part) for part in error["loc"]]
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        return key, _unknown_key(path)
    if error["type"] == "hybrid":
        element = error["ctx"]["at"]
        key = key + element if path else element
        return key, f"{key}: {error['msg']}"
    if error["type"] in ("model_type", "model_attributes_type") and path:
        section = section_of(HybridConfig.model_fields.get(path[0]))
        keys = ", ".join(section.model_fields) if section else ""
        return key, f"{key}: got {show(error['input'])}, expected a mapping with any of the keys {keys}"
    return key, f"{key}: got {show(error['input'])}: {error['msg']}"


def config_from_mapping(mapping: Mapping[str, object], source: str) -> HybridConfig:
    """Check a mapping and return its configuration.

    Args:
        mapping: keys and values as in YAML.
        source: name of the mapping in errors, such as a file's path.

    Raises:
        ConfigError: a key or a value is wrong. The line names ``source``, the key, the value and what is allowed.
    """
    if not isinstance(mapping, Mapping):
        fail(f"{source}: got {show(mapping)}, expected a mapping of keys to values")
    _require_text_keys(mapping, source)
    try:
        plain = {key: dict(value) if isinstance(value, Mapping) else value for key, value in mapping.items()}
        return HybridConfig.model_validate(plain)
    except ValidationError as error:
        reasons: dict[str, str] = {}
        for item in error.errors(include_url=False):
            key, reason = _explain(item)
            reasons.setdefault(key, reason)
    first, more = next(iter(reasons.values())), len(reasons) - 1
    tail = f" (and {more} more problem{'s' if more > 1 else ''})" if more else ""
    fail(f"{source}: {first}{tail}")


def _require_text_keys(mapping: Mapping[Any, object], source: str, prefix: str = "") -> None:
    for key, value in mapping.items():
        if not isinstance(key, str):
            fail(f"{source}: {prefix}{show(key)}: unknown key {show(key)}; write a name as the key")
        if isinstance(value, Mapping) and not prefix:
            _require_text_keys(value, source, f"{key}.")


class _Loader(yaml.SafeLoader):
    """YAML without duplicate keys, tags (``!!bool``), many aliases and deep nesting.

    Aliases and merges of aliases could spell gigabytes in a few hundred bytes. As in YAML 1.2, 1e-1 is a number, and a
    head such as 3:1 is text.
    """

    _aliases = 0

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        tag: str = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        is_base_60 = tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float") and ":" in value
        return self.DEFAULT_SCALAR_TAG if is_base_60 else tag

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    _refuse_at(key.start_mark, f"key {show(key.value)} is written twice; keep one")
                keys.add(key.value)
        return node

    def fetch_flow_collection_start(self, token_class: Any) -> None:
        if self.flow_level >= MOST_DEPTH:
            _refuse_at(self.get_mark(), f"more than {MOST_DEPTH} brackets in each other")
        super().fetch_flow_collection_start(token_class)

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if tag := getattr(event, "tag", None):
            name = str(tag).replace("tag:yaml.org,2002:", "!!")
            _refuse_at(event.start_mark, f"tag {show(name)}; write the value without a tag")
        if isinstance(event, yaml.AliasEvent):
            self._aliases += 1
            if self._aliases > MOST_ALIASES:
                _refuse_at(
                    event.start_mark,
                    f"more than {MOST_ALIASES} aliases such as *name; write the values themselves",
                )
        return super().compose_node(parent, index)


def _refuse_at(mark: Any, problem: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _parse(text: str, source: str) -> Mapping[str, object]:
    with reading(source, form="YAML"):
        data = yaml.load(text, Loader=_Loader)  # _Loader is a SafeLoader.
    if data is None:
        fail(f"{source}: is empty; write a key such as 'method: scout', or {{}} for defaults")
    if not isinstance(data, Mapping):
        got = show(data)
        fail(f"{source}: got {got}, expected a mapping such as 'budget_tokens: 2048'")
    return data


def _is_inline(path_or_text: str | Path) -> bool:
    """Tell whether a text is the YAML or JSON itself, and not a path."""
    return isinstance(path_or_text, str) and path_or_text.lstrip().startswith("{")


def source_of(path_or_text: str | Path) -> str:
    """Return the name of a file, or of a text that is the YAML itself, in messages."""
    return "inline" if _is_inline(path_or_text) else str(user_path(path_or_text))


def load_mapping(path_or_text: str | Path, source: str | None = None) -> Mapping[str, object]:
    """Return the unchecked content of a YAML file, or of a text that starts with ``{``, for `apply_overrides`."""
    name = source or source_of(path_or_text)
    if isinstance(path_or_text, str) and _is_inline(path_or_text):
        return _parse(path_or_text.replace("\t", " "), name)  # YAML, unlike JSON, has no tabs between tokens.
    if not str(path_or_text).strip():
        fail("config: the path is empty; give the path of a YAML file, or leave it out to use the model's")
    fix = "give a readable YAML file, or leave it out to use the model's"
    return _parse(read_text(path_or_text, fix, name=name, most=MOST_BYTES), name)


def load_config(path_or_text: str | Path) -> HybridConfig:
    """Return the configuration in a YAML file, or in a text that starts with ``{``."""
    return config_from_mapping(load_mapping(path_or_text), source_of(path_or_text))


def apply_overrides(mapping: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """Return a copy of ``mapping`` with each ``dotted.key=value`` set, the value read as YAML; later overrides win."""
    result: dict[str, Any] = copy.deepcopy(dict(mapping))
    for key, value in map(parse_override, overrides):
        section, _, name = key.rpartition(".")
        target = result
        if section:
            target = dict(result[section]) if isinstance(result.get(section), Mapping) else {}
            result[section] = target
        target[name] = value
    return result


def parse_override(override: str) -> tuple[str, object]:
    """Split ``dotted.key=value`` into the key and the value.

    Raises:
        ConfigError: the text has another form, or there is no such key.
    """
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key or not text.strip():
        fail(f"--set {show(override)}: expected key=value, such as budget_tokens=1024")
    if key not in {name for name, _ in iter_keys()} | set(HybridConfig.model_fields):
        fail(f"--set {_unknown_key(key.split('.'))}")
    with reading(f"--set {key}: got {show(text)}, expected a YAML value", form="YAML"):
        return key, yaml.load(text, Loader=_Loader)  # _Loader is a SafeLoader.


def shipped_configs() -> tuple[Path, ...]:
    """Return the YAML files that are installed with the package, sorted by name."""
    try:
        folder = Path(str(importlib.resources.files("hybrid_backend.configs")))
    except ModuleNotFoundError:
        folder = Path()
    files = tuple(sorted(folder.glob("*.yaml"))) if folder != Path() else ()
    if not any(file.name == DEFAULT_FILE for file in files):
        fail(f"hybrid_backend.configs: {DEFAULT_FILE} is not installed; reinstall hybrid_backend")
    return files


def find_config(model_name: str) -> Path:
    """Return the shipped file whose ``model.match`` fits the model best; default.yaml if no pattern names the model."""
    files = shipped_configs()
    best, best_score = next(file for file in files if file.name == DEFAULT_FILE), -1
    for file in files:
        score = load_config(file).model.specificity(model_name)
        if score is not None and score > best_score:
            best, best_score = file, score
    return best


def resolve_config(
    model_name: str,
    explicit: str | Path | Mapping[str, object] | None,
    env: Mapping[str, str],
    overrides: Sequence[str] = (),
) -> tuple[HybridConfig, str]:
    """Return the configuration to use, and where it came from.

    ``explicit`` wins over HYBRID_CONFIG, which wins over the shipped file for the model's name, which wins over
    default.yaml. A text that starts with ``{`` is the YAML or JSON itself, any other text is a path.

    Args:
        model_name: hub id or path of the model.
        explicit: what the user passed to the command or the engine.
        env: environment; an empty HYBRID_CONFIG counts as unset.
        overrides: ``dotted.key=value`` texts, applied last.

    Raises:
        ConfigError: a file cannot be read, or a key or a value is wrong.
    """
    chosen = explicit if explicit is not None else (env.get(ENV_CONFIG, "").strip() or None)
    origin = "explicit" if explicit is not None else ENV_CONFIG
    mapping: Mapping[str, object]
    if isinstance(chosen, str | Path):
        source = f"{origin} (inline)" if _is_inline(chosen) else f"{chosen} ({origin})"
        mapping = load_mapping(chosen, source)
    elif chosen is not None:
        source = f"{origin} (mapping)"
        mapping = chosen
    else:
        path = find_config(model_name)
        reason = f"{'matches' if path.name != DEFAULT_FILE else 'no shipped file matches'} {model_name}"
        source = f"{path} ({reason})"
        mapping = load_mapping(path, source)
    if overrides:
        if isinstance(mapping, Mapping):
            mapping = apply_overrides(mapping, overrides)
        source += " with --set"
    return config_from_mapping(mapping, source), source
