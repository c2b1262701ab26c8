"""The YAML configuration: what may be written, what it means and where every number comes from.

A key is declared once, below: its type, its default, a `Rule` (the sentence a user reads when the value is
wrong, and the function that enforces it) and a docstring that ends with the source of the number. The error
messages and docs/configuration.md follow from that declaration.

Papers: ScoutAttention is arXiv 2603.27138, Quest is arXiv 2406.10774, StreamingLLM is arXiv 2309.17453.
"""

from __future__ import annotations

import copy
import difflib
import fnmatch
import hashlib
import importlib.resources
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import yaml
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from hybrid_backend.errors import ConfigError

ENV_CONFIG = "HYBRID_CONFIG"
DEFAULT_FILE = "default.yaml"
_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


# -- rules: what one key may hold ---------------------------------------------------------------------------


class _Wrong(Exception):
    """A value breaks a rule; `index` is its place in a list, `hint` an optional way out."""

    def __init__(self, hint: str = "", index: int | None = None) -> None:
        super().__init__(hint)
        self.hint, self.index = hint, index


@dataclass(frozen=True)
class Rule:
    """What a key accepts: `allowed` completes "expected ...", `check` returns the value or refuses it."""

    allowed: str
    check: Callable[[object], object]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._enforce, handler(source))

    def _enforce(self, value: object) -> object:
        try:
            return self.check(value)
        except _Wrong as wrong:
            element = value if wrong.index is None else value[wrong.index]  # type: ignore[index]
            at = "" if wrong.index is None else f"[{wrong.index}]"
            _refuse(at, element, self.allowed, wrong.hint)


def _refuse(key: str, value: object, expected: str, hint: str = "") -> NoReturn:
    raise PydanticCustomError(
        "hybrid",
        "got {got}, expected {expected}{hint}",
        {"at": key, "got": _show(value), "expected": expected, "hint": f" ({hint})" if hint else ""},
    )


def _rule(allowed: str, accepts: Callable[[object], bool]) -> Rule:
    def check(value: object) -> object:
        if not accepts(value):
            raise _Wrong
        return value

    return Rule(allowed, check)


def _is_int(value: object) -> bool:
    """A whole number that native code can hold too."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _integer(low: int) -> Rule:
    return _rule(f"an integer >= {low}", lambda v: _is_int(v) and v >= low)  # type: ignore[operator]


def _number(low: float, high: float = math.inf) -> Rule:
    def accepts(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return low < value <= high and value < math.inf

    return _rule(f"a number > {low:g}" + (f" and <= {high:g}" if high < math.inf else ""), accepts)


def _integer_of(*choices: int) -> Rule:
    return _rule(f"one of {', '.join(map(str, choices))}", lambda v: _is_int(v) and v in choices)


def _choice(*choices: str) -> Rule:
    def check(value: object) -> object:
        if not isinstance(value, str) or value not in choices:
            raise _Wrong(_did_you_mean(value, choices))
        return value

    return Rule("one of " + ", ".join(choices) if len(choices) > 1 else choices[0], check)


def _name(pattern: str, allowed: str) -> Rule:
    return _rule(allowed, lambda v: isinstance(v, str) and re.fullmatch(pattern, v) is not None)


def _list_of(item: Rule, ordered: bool = False, unique: bool = False, empty: bool = True) -> Rule:
    words = ["a", *(["sorted"] if ordered else []), *([] if empty else ["non-empty"]), "list, each item"]
    allowed = " ".join(words) + f" {item.allowed}" + (", no item twice" if unique else "")

    def check(value: object) -> object:
        if not isinstance(value, list | tuple) or (not value and not empty):
            raise _Wrong
        for index, element in enumerate(value):
            try:
                item.check(element)
            except _Wrong as wrong:
                raise _Wrong(wrong.hint, index) from None
        if unique and len(set(value)) < len(value):
            raise _Wrong(f"write {_show(sorted(set(value)) if ordered else list(dict.fromkeys(value)))}")
        if ordered and sorted(value) != list(value):
            raise _Wrong(f"write {_show(sorted(value))}")
        return tuple(value)

    return Rule(allowed, check)


def _either(scalar: Rule, other: Rule) -> Rule:
    def check(value: object) -> object:
        return (other if isinstance(value, list | tuple) else scalar).check(value)

    return Rule(f"{scalar.allowed}, or {other.allowed}", check)


def _auto_or(rule: Rule) -> Rule:
    def check(value: object) -> object:
        if not isinstance(value, str) or value == "auto":
            return value if value == "auto" else rule.check(value)
        try:
            return rule.check(value)
        except _Wrong as wrong:
            raise _Wrong(wrong.hint or _did_you_mean(value, ("auto",))) from None

    return Rule(f"auto, or {rule.allowed}", check)


def parse_size(value: object) -> int:
    """Bytes of `8GiB`, `512 MiB`, `1.5GiB` or a plain number of bytes; ValueError says what is wrong."""
    if isinstance(value, int) and _is_int(value) and value > 0:
        return value
    text = value.strip() if isinstance(value, str) else ""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)", text)
    if match is None:
        raise ValueError("")
    number, unit = match.groups()
    if unit.upper() not in _UNITS:
        binary = unit[:1].upper() + "iB"
        raise ValueError(f"write {number}{binary}" if binary.upper() in _UNITS else "")
    size = Fraction(number) * _UNITS[unit.upper()]
    if size.denominator != 1 or not 0 < size < 2**63:
        raise ValueError("")
    return int(size)


def format_size(size: int) -> str | int:
    """The shortest exact spelling of a number of bytes that `parse_size` reads back."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return size


def _check_size(value: object) -> object:
    try:
        return parse_size(value)
    except ValueError as error:
        raise _Wrong(str(error)) from None


def _check_patterns(value: object) -> object:
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]  # a list of one means the same as its item, and hashes the same
    return _either(_PATTERN, _list_of(_PATTERN, empty=False, unique=True)).check(value)


_PATTERN = _rule("a non-empty name pattern", lambda v: isinstance(v, str) and v.strip() != "")
_BOOL = _rule("true or false", lambda v: isinstance(v, bool))
_SIZE = Rule("a size > 0 such as 8GiB, 512MiB or a whole number of bytes", _check_size)


# -- models -------------------------------------------------------------------------------------------------


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelMatch(_Section):
    """Which models a file is for."""

    match: Annotated[
        str | tuple[str, ...], Rule("a name pattern such as *qwen3-8b*, or a list of them", _check_patterns)
    ] = "*"
    """Shell pattern(s), compared without case to the Hugging Face id and to the directory name; the file with
    the longest literal text in its matching pattern wins. Source: default (any model)."""
    family: Annotated[
        Literal["auto", "llama", "qwen2", "qwen3", "mistral", "gemma3", "glm4"],
        _choice("auto", "llama", "qwen2", "qwen3", "mistral", "gemma3", "glm4"),
    ] = "auto"
    """Layer structure used to predict the next layer's query; auto reads the model's own config.
    Source: default."""

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.match,) if isinstance(self.match, str) else self.match

    def specificity(self, model_name: str) -> int | None:
        """Literal characters of the longest pattern that matches the model; None when none does."""
        names = _names_of(model_name)
        scores = [
            len(re.sub(r"\[[^]]*\]|[*?]", "", pattern))
            for pattern in self.patterns
            if any(fnmatch.fnmatchcase(name, pattern.lower()) for name in names)
        ]
        return max(scores, default=None)


class SelectionConfig(_Section):
    """How pages are scored and chosen."""

    granularity: Annotated[Literal["layer", "kv_head"], _choice("layer", "kv_head")] = "layer"
    """One selection per layer or one per KV head. Source: measured (SmolLM2-135M, page 32, budget 1024: layer
    covers 0.919 of the attention mass, per head 0.918)."""
    digest: Annotated[Literal["minmax"], _choice("minmax")] = "minmax"
    """Page summary: channel-wise min and max of K. Source: Quest."""
    aggregate: Annotated[Literal["sum", "max"], _choice("sum", "max")] = "sum"
    """How the scores of the query heads of one group combine; granularity layer then always sums over the KV
    heads. Source: measured (SmolLM2-135M, page 32, budget 1024: the raw sum covers 0.921)."""


class LookaheadConfig(_Section):
    """Working one layer ahead with a predicted query."""

    enabled: Annotated[bool | Literal["auto"], _auto_or(_BOOL)] = "auto"
    """Predict the query of layer l+1 at the input of layer l and start the CPU one layer early; auto is true
    where the tiers are separate: with unified tiers nobody waits, and the true query selects.
    Source: ScoutAttention (layer-ahead CPU pre-computation)."""
    partial_query: Annotated[Literal["predicted", "real"], _choice("predicted", "real")] = "predicted"
    """Query of the CPU's partial: the predicted one overlaps with the device, the real one is exact but known
    later. Source: ScoutAttention (predicted; its stated source of loss)."""


class RecallConfig(_Section):
    """Asynchronous copies of newly important pages to the device tier."""

    enabled: Annotated[bool, _BOOL] = True
    """Recall pages at all; without it the resident pages of a request stay as prefill left them.
    Source: ScoutAttention (asynchronous periodic recall)."""
    threshold: Annotated[float, _number(0, 1)] = 0.12
    """Share of a layer's attended tokens computed on the CPU that the profiled intervals stay below.
    Source: ScoutAttention (12 %; it reports 8.2 % on average)."""
    intervals: Annotated[
        int | tuple[int, ...],
        _either(_integer(1), _list_of(_integer(1), empty=False)),
    ] = 8
    """Decode steps between recalls; a list holds one interval per layer of the model.
    Source: default (measured on SmolLM2-135M: a selection 16 steps old covers 0.911, a fresh one 0.919)."""


class WorkersConfig(_Section):
    """The CPU workers."""

    kernel: Annotated[str, _name(r"[a-z][a-z0-9_-]*", "auto, or a lowercase kernel name")] = "auto"
    """CPU attention kernel; auto takes the fastest one that is installed. Source: default."""
    threads: Annotated[int | Literal["auto"], _auto_or(_integer(1))] = "auto"
    """Worker threads; auto is one per CPU in workers.cpus. Source: default."""
    cpus: Annotated[tuple[int, ...] | Literal["auto"], _auto_or(_list_of(_integer(0), unique=True, empty=False))] = (
        "auto"
    )
    """CPU numbers the workers may run on; auto takes those that the engine's threads leave.
    Source: default."""
    per_sequence_groups: Annotated[bool, _BOOL] = True
    """Each sequence is a job of its own; otherwise the whole batch is one.
    Source: ScoutAttention (a group of threads per sequence)."""
    deadline_seconds: Annotated[float, _number(0)] = 30.0
    """Longest wait for a CPU partial before the step fails with an error instead of hanging.
    Source: default."""


class HostPoolConfig(_Section):
    """The host pool: all pages of all sequences, in DRAM."""

    size: Annotated[int | Literal["auto"], _auto_or(_SIZE)] = "auto"
    """Memory of the host pool on this rank; auto sizes it from the free DRAM and the digest budget.
    Source: default."""

    @property
    def size_bytes(self) -> int | None:
        """Bytes, or None for auto."""
        return None if isinstance(self.size, str) else self.size


class MetricsConfig(_Section):
    """What the backend reports about its own approximations."""

    sample_interval: Annotated[int, _integer(0)] = 64
    """Decode steps between samples of predicted-query cosine and attention-mass recall; 0 turns them off.
    Source: default."""


class HybridConfig(_Section):
    """One model's configuration. Immutable; build it with the functions below to get readable errors."""

    model: ModelMatch = ModelMatch()
    method: Annotated[str, _name(r"[a-z][a-z0-9_]*", "a lowercase method name such as scout")] = "scout"
    """The published method that places, selects and computes. Source: default (ScoutAttention)."""
    page_size: Annotated[int, _integer_of(16, 32, 64, 128)] = 32
    """Tokens of a page, which is the engine's KV block. Source: ScoutAttention (32); Quest uses 16."""
    budget_tokens: Annotated[int, _integer(16)] = 2048
    """Tokens attended per sequence, layer and decode step; a multiple of page_size, and more pages than
    sinks + recent. Source: ScoutAttention (evaluated at 1024 and 2048)."""
    sinks: Annotated[int, _integer(0)] = 1
    """First pages of a sequence that are always attended.
    Source: default (StreamingLLM keeps the first 4 tokens)."""
    recent: Annotated[int, _integer(1)] = 2
    """Last pages that are always attended, the growing tail page among them.
    Source: default (Quest: the last page is not up for selection)."""
    sparse: Annotated[Literal["auto", "always", "never"], _choice("auto", "always", "never")] = "auto"
    """auto: exact while the whole context fits the slots; always: sparse beyond the budget; never: exact.
    Source: default."""
    tiers: Annotated[Literal["auto", "separate", "unified"], _choice("auto", "separate", "unified")] = "auto"
    """separate: the device tier holds copies in slots; unified: it reads the host pool itself; auto: unified
    when the device tier is the CPU. Source: default."""
    slots_per_request: Annotated[int | Literal["auto"], _auto_or(_integer(1))] = "auto"
    """Pages of the device tier per running request, at least sinks + recent + 1; auto is budget + recent + 1
    pages on the CPU. Source: default."""
    exact_layers: Annotated[tuple[int, ...], _list_of(_integer(0), ordered=True, unique=True)] = ()
    """Layers that always attend every token.
    Source: default (none; Quest keeps the first two dense, and `hybrid profile` measures them per model)."""
    selection: SelectionConfig = SelectionConfig()
    lookahead: LookaheadConfig = LookaheadConfig()
    recall: RecallConfig = RecallConfig()
    workers: WorkersConfig = WorkersConfig()
    host_pool: HostPoolConfig = HostPoolConfig()
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="after")
    def _check_pages(self) -> HybridConfig:
        page, budget, always = self.page_size, self.budget_tokens, self.sinks + self.recent
        least = (always + 1) * page
        if budget % page:
            near = [n for n in (budget // page * page, (budget // page + 1) * page) if n >= least] or [least]
            fix = f"write {' or '.join(map(str, near))}"
            _refuse("budget_tokens", budget, f"a multiple of page_size {page}", fix)
        if budget < least:
            expected = f"more than the sinks {self.sinks} + recent {self.recent} pages, always attended"
            _refuse("budget_tokens", budget, expected, f"write {least} or more at page_size {page}")
        if isinstance(self.slots_per_request, int) and self.slots_per_request <= always:
            expected = f"auto, or an integer >= sinks {self.sinks} + recent {self.recent} + 1"
            _refuse("slots_per_request", self.slots_per_request, expected, f"write {always + 1} or more")
        return self

    @property
    def budget_pages(self) -> int:
        return self.budget_tokens // self.page_size

    @property
    def automatic_slots(self) -> int:
        """Slots per request that `auto` means on the CPU: the budget, a recent window, one page in flight."""
        return self.budget_pages + self.recent + 1

    def recall_interval(self, layer: int) -> int:
        """Decode steps between two recalls of this layer."""
        intervals = self.recall.intervals
        if isinstance(intervals, int):
            return intervals
        if not 0 <= layer < len(intervals):
            _fail(
                f"recall.intervals: got {len(intervals)} intervals, but layer {layer} was asked for; "
                "write one interval per layer, or a single integer"
            )
        return intervals[layer]

    def validate_for(self, num_layers: int, source: str = "config") -> None:
        """Raise ConfigError unless the per-layer keys fit a model with `num_layers` layers."""
        outside = [layer for layer in self.exact_layers if layer >= num_layers]
        if outside:
            _fail(
                f"{source}: exact_layers: got {_show(outside[0])}, expected layers 0..{num_layers - 1} "
                f"of a model with {num_layers} layers (remove {_show(outside)})"
            )
        intervals = self.recall.intervals
        if not isinstance(intervals, int) and len(intervals) != num_layers:
            _fail(
                f"{source}: recall.intervals: got a list of {len(intervals)}, expected {num_layers}, "
                "one per layer of the model (or write a single integer for all layers)"
            )

    def canonical_hash(self) -> str:
        """16 hex digits that change exactly when the content does; part of the engine's compile-cache key."""
        content = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        """All keys, in the order of the documentation; `load_config` reads the same configuration back."""
        data = self.model_dump(mode="json")
        if isinstance(self.host_pool.size, int):
            data["host_pool"]["size"] = format_size(self.host_pool.size)
        return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True)


def iter_keys(model: type[BaseModel] = HybridConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key that can be set, dotted, with its declaration."""
    for name, field in model.model_fields.items():
        section = _section(field)
        if section is None:
            yield prefix + name, field
        else:
            yield from iter_keys(section, f"{prefix}{name}.")


def rule_of(field: FieldInfo) -> Rule:
    return next(item for item in field.metadata if isinstance(item, Rule))


# -- errors: one line each ----------------------------------------------------------------------------------


def _section(field: FieldInfo | None) -> type[_Section] | None:
    kind = field.annotation if field else None
    return kind if isinstance(kind, type) and issubclass(kind, _Section) else None


def _show(value: object) -> str:
    """A value as the user wrote it, on one line and not too long."""
    text = f"a value of type {type(value).__name__}"
    for spell in (repr,) if isinstance(value, str) else (json.dumps, repr):
        try:
            text = spell(value)
            break
        except (TypeError, ValueError):  # not JSON, circular, or too many digits
            continue
    return text if len(text) <= 60 else text[:57] + "..."


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _did_you_mean(word: object, choices: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(word).lower(), choices, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""


def _fail(message: str) -> NoReturn:
    raise ConfigError(_one_line(message)) from None


def _unknown_key(path: Sequence[str]) -> str:
    """Why a dotted path is not a key, with the most likely meant one."""
    model: type[BaseModel] = HybridConfig
    for name in path[:-1]:
        section = _section(model.model_fields.get(name))
        if section is None:
            break
        model = section
    here, word = ".".join(path[:-1]), path[-1]
    moved = [key for key, _ in iter_keys() if key.rpartition(".")[2] == word]
    hint = f"did you mean {' or '.join(moved)}?" if moved else _did_you_mean(word, list(model.model_fields))
    if not hint:
        hint = f"{here or 'the top level'} has the keys {', '.join(model.model_fields)}"
    return f"{_one_line('.'.join(path))}: unknown key {_show(word)}; {hint}"


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
        section = _section(HybridConfig.model_fields.get(path[0]))
        keys = ", ".join(section.model_fields) if section else ""
        return key, f"{key}: got {_show(error['input'])}, expected a mapping with any of the keys {keys}"
    return key, f"{key}: got {_show(error['input'])}: {error['msg']}"


def config_from_mapping(mapping: Mapping[str, object], source: str) -> HybridConfig:
    """The configuration in a mapping; ConfigError names `source`, the key, the value and what is allowed."""
    if not isinstance(mapping, Mapping):
        _fail(f"{source}: got {_show(mapping)}, expected a mapping of keys to values")
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
    _fail(f"{source}: {first}{tail}")


def _require_text_keys(mapping: Mapping[Any, object], source: str, prefix: str = "") -> None:
    for key, value in mapping.items():
        if not isinstance(key, str):
            _fail(f"{source}: {prefix}{_show(key)}: unknown key {_show(key)}; write a name as the key")
        if isinstance(value, Mapping) and not prefix:
            _require_text_keys(value, source, f"{key}.")


# -- files --------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML with duplicate keys refused, and 1e-1 read as a number as in YAML 1.2 and JSON."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {_show(key.value)} is written twice; keep one", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _parse(text: str, source: str) -> Mapping[str, object]:
    try:
        data = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        _fail(f"{source}:{where} {error.problem or error.context}")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        _fail(f"{source}: not valid YAML: {error}")
    if data is None:
        _fail(f"{source}: is empty; write a key such as 'method: scout', or {{}} for defaults")
    if not isinstance(data, Mapping):
        got = _show(data)
        _fail(f"{source}: got {got}, expected a mapping such as 'budget_tokens: 2048'")
    return data


def load_mapping(path: str | Path, source: str | None = None) -> Mapping[str, object]:
    """The unchecked content of a YAML file, for `apply_overrides`."""
    if not str(path).strip():
        _fail(f"{source or 'config'}: the path is empty; give the path of a YAML file")
    file = Path(path).expanduser()
    name = source or str(file)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        _fail(f"{name}: no such file; check the path, or leave it out to use the model's")
    except UnicodeDecodeError as error:
        _fail(f"{name}: not UTF-8 text (byte {error.start}); save the file as UTF-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        _fail(f"{name}: cannot be read ({reason}); give a readable YAML file")
    return _parse(text, name)


def load_config(path: str | Path) -> HybridConfig:
    """The configuration in a YAML file."""
    return config_from_mapping(load_mapping(path), str(Path(path).expanduser()))


def apply_overrides(mapping: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """A copy of `mapping` with each `dotted.key=value` set, the value read as YAML; later ones win."""
    result: dict[str, Any] = copy.deepcopy(dict(mapping))
    known = {key for key, _ in iter_keys()} | set(HybridConfig.model_fields)
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key or not text.strip():
            _fail(f"--set {_show(override)}: expected key=value, such as budget_tokens=1024")
        if key not in known:
            _fail(f"--set {_unknown_key(key.split('.'))}")
        section, _, name = key.rpartition(".")
        target = result
        if section:
            target = dict(result[section]) if isinstance(result.get(section), Mapping) else {}
            result[section] = target
        target[name] = _override_value(text, key)
    return result


def _override_value(text: str, key: str) -> object:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = getattr(error, "problem", None) or str(error)
        _fail(f"--set {key}: got {_show(text)}, expected a YAML value ({reason})")


# -- choosing a configuration -------------------------------------------------------------------------------


def _names_of(model_name: str) -> tuple[str, ...]:
    """Lower-case names a model goes by: its id or path, the last part, and the id inside a hub cache path."""
    full = model_name.strip().rstrip("/").lower()
    names = [full, full.rpartition("/")[2]]
    cached = re.search(r"(?:^|/)models--([^/]+)", full)
    if cached:
        names += [cached[1].replace("--", "/"), cached[1].rpartition("--")[2]]
    return tuple(names)


def shipped_configs() -> tuple[Path, ...]:
    """The YAML files that are installed with the package, sorted by name."""
    try:
        folder = Path(str(importlib.resources.files("hybrid_backend.configs")))
    except ModuleNotFoundError:
        folder = Path()
    files = tuple(sorted(folder.glob("*.yaml"))) if folder != Path() else ()
    if not any(file.name == DEFAULT_FILE for file in files):
        _fail(f"hybrid_backend.configs: {DEFAULT_FILE} is not installed; reinstall hybrid_backend")
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
    if isinstance(given, str) and given.lstrip().startswith("{"):
        source = f"{origin} (inline)"
        mapping = _parse(given.replace("\t", " "), source)  # YAML, unlike JSON, has no tabs between tokens
    elif isinstance(given, str | Path):
        source = f"{given} ({origin})"
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
