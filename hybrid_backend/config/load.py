"""From files, flags and the environment to a `HybridConfig`; every mistake is one line."""

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
"""Aliases (``*name``) of one YAML text. Sixteen can repeat a value 400 times at most."""
MOST_DEPTH = 32
"""Brackets of one YAML text that are open at once. PyYAML's time grows with their square."""
MOST_BYTES = 1 << 17
"""Size limit of a configuration file, which PyYAML reads in seconds."""


def _unknown_key(path: Sequence[str]) -> str:
    """Why a dotted path is not a key, with the most likely meant one."""
    model: type[BaseModel] = HybridConfig
    place = 0
    while place < len(path) - 1 and (section := section_of(model.model_fields.get(path[place]))):
        model, place = section, place + 1
    is_single = place < len(path) - 1 and path[place] in model.model_fields  # a key, but without keys of its own
    here, word = ".".join(path[:place]), path[place + is_single]
    moved = [key for key, _ in iter_keys() if key.rpartition(".")[2] == path[-1]]
    hint = f"did you mean {' or '.join(moved)}?" if moved else did_you_mean(path[place], list(model.model_fields))
    if not hint:
        hint = f"{here or 'the top level'} has the keys {', '.join(model.model_fields)}"
    return f"{'.'.join(path)}: unknown key {show(word)}; {hint}"


def _explain(error: Mapping[str, Any]) -> tuple[str, str]:
    """Key path and one-line reason of one pydantic error."""
    path = [str(part) for part in error["loc"]]
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        return key, _unknown_key(path)
    if error["type"] == "hybrid":
        at = error["ctx"]["at"]
        key = key + at if path else at
        return key, f"{key}: {error['msg']}"
    if error["type"] in ("model_type", "model_attributes_type") and path:
        section = section_of(HybridConfig.model_fields.get(path[0]))
        keys = ", ".join(section.model_fields) if section else ""
        return key, f"{key}: got {show(error['input'])}, expected a mapping with any of the keys {keys}"
    return key, f"{key}: got {show(error['input'])}: {error['msg']}"


def config_from_mapping(mapping: Mapping[str, object], source: str) -> HybridConfig:
    """The configuration in a mapping; ConfigError names `source`, the key, the value and what is allowed."""
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
    """YAML without duplicate keys, tags (``!!bool``), many aliases and deep nesting. As in YAML 1.2, 1e-1 is a
    number, and 3:1, a head, is text.

    Aliases, and merges of them, can write gigabytes in a few hundred bytes.
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
        data = yaml.load(text, Loader=_Loader)  # a SafeLoader
    if data is None:
        fail(f"{source}: is empty; write a key such as 'method: scout', or {{}} for defaults")
    if not isinstance(data, Mapping):
        got = show(data)
        fail(f"{source}: got {got}, expected a mapping such as 'budget_tokens: 2048'")
    return data


def _is_inline(given: str | Path) -> bool:
    """Whether a text is the YAML or JSON itself, not a path."""
    return isinstance(given, str) and given.lstrip().startswith("{")


def source_of(given: str | Path) -> str:
    """What messages call a file, or a text that is the YAML itself."""
    return "inline" if _is_inline(given) else str(user_path(given))


def load_mapping(given: str | Path, source: str | None = None) -> Mapping[str, object]:
    """The unchecked content of a YAML file, or of a text that starts with `{`, for `apply_overrides`."""
    name = source or source_of(given)
    if isinstance(given, str) and _is_inline(given):
        return _parse(given.replace("\t", " "), name)  # YAML, unlike JSON, has no tabs between tokens
    if not str(given).strip():
        fail("config: the path is empty; give the path of a YAML file, or leave it out to use the model's")
    fix = "give a readable YAML file, or leave it out to use the model's"
    return _parse(read_text(given, fix, name=name, most=MOST_BYTES), name)


def load_config(given: str | Path) -> HybridConfig:
    """The configuration in a YAML file, or in a text that starts with `{`."""
    return config_from_mapping(load_mapping(given), source_of(given))


def apply_overrides(mapping: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """A copy of `mapping` with each `dotted.key=value` set, the value read as YAML; later ones win."""
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
    """The dotted key and the value of `dotted.key=value`."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key or not text.strip():
        fail(f"--set {show(override)}: expected key=value, such as budget_tokens=1024")
    if key not in {name for name, _ in iter_keys()} | set(HybridConfig.model_fields):
        fail(f"--set {_unknown_key(key.split('.'))}")
    with reading(f"--set {key}: got {show(text)}, expected a YAML value", form="YAML"):
        return key, yaml.load(text, Loader=_Loader)  # a SafeLoader


def shipped_configs() -> tuple[Path, ...]:
    """The YAML files that are installed with the package, sorted by name."""
    try:
        folder = Path(str(importlib.resources.files("hybrid_backend.configs")))
    except ModuleNotFoundError:
        folder = Path()
    files = tuple(sorted(folder.glob("*.yaml"))) if folder != Path() else ()
    if not any(file.name == DEFAULT_FILE for file in files):
        fail(f"hybrid_backend.configs: {DEFAULT_FILE} is not installed; reinstall hybrid_backend")
    return files


def find_config(model_name: str) -> Path:
    """The shipped file whose `model.match` fits the model best; default.yaml when none names it."""
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
    """The configuration to use and where it came from.

    `explicit` wins over HYBRID_CONFIG, which wins over the shipped file for the model's name, which wins over
    default.yaml. A text that starts with `{` is the YAML or JSON itself, any other text is a path. An empty
    HYBRID_CONFIG counts as unset. `overrides` are applied last.
    """
    given = explicit if explicit is not None else (env.get(ENV_CONFIG, "").strip() or None)
    origin = "explicit" if explicit is not None else ENV_CONFIG
    mapping: Mapping[str, object]
    if isinstance(given, str | Path):
        source = f"{origin} (inline)" if _is_inline(given) else f"{given} ({origin})"
        mapping = load_mapping(given, source)
    elif given is not None:
        source = f"{origin} (mapping)"
        mapping = given
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
