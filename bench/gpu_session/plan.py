"""The cases of a session, in order of value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.gpu_session.journal import Case

PARTS = ("serve", "prefill", "traffic", "decode", "kernels")
ABLATIONS = ("no-lookahead", "no-recall")
METHODS = ("scout", "infinigen", "hgca", "clo", "apex", "headinfer", "dense")
START = 100.0
"""Seconds for a start of an engine of 14B parameters with no kernel compiled (docs/lab/cuda.md: 83 on an H200)."""


@dataclass(frozen=True)
class Sizes:
    """What a session measures. The defaults are for a GPU; `rehearsal` has the least with the same code paths.

    ``model`` has trained weights, ``shape`` is a key of `bench.model_configs.SHAPES`, whose weights are random.
    ``engine`` are options of offline engines, ``flags`` those of all servers, ``stock_flags`` of stock's alone.
    ``keys`` are added to the hybrid backend's configuration in part decode. ``pool`` is the bytes of the host pool of
    servers with trained weights, ``host_bytes`` the host memory of the others. ``slowness`` multiplies all times.
    """

    model: str
    host_bytes: int
    cards_gb: Sequence[float] = (80, 48)
    shape: str = "qwen3-14b"
    stock: str = "FLASH_ATTN"
    dtypes: Sequence[str] = ("float32", "bfloat16")
    equal_contexts: Sequence[int] = (200, 1000, 1900)
    equal_answer: int = 64
    accuracy: Mapping[str, Any] = field(
        default_factory=lambda: {"context": 16384, "samples": 2, "answer": 64, "dtype": "bfloat16", "budgets": ""}
    )
    prefill_contexts: Sequence[int] = (8192, 16384, 32768, 65536, 131072)
    traffic: Mapping[str, Any] = field(
        default_factory=lambda: {"input": 32768, "output": 256, "prompts": 24, "dtype": "bfloat16", "most": 64}
    )
    decode_context: int = 32768
    steps: tuple[int, int] = (32, 160)
    most: int = 256
    profiled: int = 16
    page_spread: float = 0.03
    keys: Mapping[str, Any] = field(default_factory=dict)
    kernels: Mapping[str, Any] = field(
        default_factory=lambda: {"context": 32768, "batches": [1, 8, 40], "budget": 2048, "chunk": 2048, "bench": {}}
    )
    engine: Mapping[str, Any] = field(default_factory=dict)
    flags: Sequence[str] = ()
    stock_flags: Sequence[str] = ()
    pool: int = 4 << 30
    slowness: float = 1.0


def cases(sizes: Sizes, parts: Sequence[str] = PARTS) -> list[Case]:
    """Return the cases of ``parts``, the most valuable first."""
    made = [case for part in parts for case in _MAKERS[part](sizes)]
    return [replace(case, needs=case.needs * sizes.slowness, most=case.most * sizes.slowness) for case in made]


def _serve(sizes: Sizes) -> Iterator[Case]:
    servers = {"model": sizes.model, "flags": [*sizes.flags], "stock_flags": [*sizes.stock_flags], "pool": sizes.pool}

    def equal(dtype: str) -> Case:
        options = {
            **servers, "what": "equal", "dtype": dtype, "contexts": [*sizes.equal_contexts],
            "answer": sizes.equal_answer,
        }  # fmt: skip
        return Case("serve", f"serve-equal-{dtype}", options, 1.5 * START, 420)

    yield equal(sizes.dtypes[0])
    context = sizes.accuracy["context"]
    yield Case("serve", f"serve-accuracy-{context}", {**servers, "what": "accuracy", **sizes.accuracy}, 150, 480)
    yield from map(equal, sizes.dtypes[1:])


def _prefill(sizes: Sizes) -> Iterator[Case]:
    for kind in (sizes.stock, "scout"):
        options = {
            "kind": kind, "shape": sizes.shape, "contexts": [*sizes.prefill_contexts], "card_gb": sizes.cards_gb[0],
            "host_bytes": sizes.host_bytes, "engine": dict(sizes.engine),
        }  # fmt: skip
        yield Case("prefill", f"prefill-{kind}", options, START + 40, 420)


def _traffic(sizes: Sizes) -> Iterator[Case]:
    for card in sizes.cards_gb:
        for kind in ("stock", "scout"):
            options = {
                "kind": kind, "shape": sizes.shape, "card_gb": card, "host_bytes": sizes.host_bytes,
                "tokenizer": sizes.model, "flags": [*sizes.flags], "stock_flags": [*sizes.stock_flags], **sizes.traffic,
            }  # fmt: skip
            yield Case("traffic", f"traffic-{card:g}-{kind}", options, START + 80, 480)


def _decode(sizes: Sizes) -> Iterator[Case]:
    def case(kind: str, card: float, spread: float) -> Case:
        run = {
            "kind": kind, "context": sizes.decode_context, "batch": None, "card_gb": card, "most": sizes.most,
            "host_bytes": sizes.host_bytes, "steps": list(sizes.steps), "page_spread": spread,
            "is_compiled": False, "profiled": sizes.profiled, "options": dict(sizes.engine), "keys": dict(sizes.keys),
        }  # fmt: skip
        name = f"decode-{card:g}-{kind}" + ("" if spread else "-random-keys")
        return Case("decode", name, {"shape": sizes.shape, "run": run}, START, 300)

    card, spread = sizes.cards_gb[0], sizes.page_spread
    for kind in (sizes.stock, "scout", *ABLATIONS):
        yield case(kind, card, spread)
    yield case("scout", card, 0.0)  # The spread is a tuned input: the figure without it belongs beside the one with it.
    for kind in METHODS[1:]:
        yield case(kind, card, spread)
    for card in sizes.cards_gb[1:]:
        for kind in (sizes.stock, "scout"):
            yield case(kind, card, spread)


def _kernels(sizes: Sizes) -> Iterator[Case]:
    yield Case("kernels", "kernels", dict(sizes.kernels), 60, 240)


_MAKERS = {"serve": _serve, "prefill": _prefill, "traffic": _traffic, "decode": _decode, "kernels": _kernels}
