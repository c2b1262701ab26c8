"""A peer: what it is, how it is started, and with whom it is compared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tests.engines.server import Server

DTYPES = {"float32": "F32", "bfloat16": "BF16"}  # the engines' word: GGUF's

GROUPS = {
    "equal": "weights and what is computed in the run's dtype",
    "kv8": "as equal, but K and V in 8 bits",
    "int8": "weights of 8 bits",
    "int4": "weights of 4 bits",
    "untouched": "started without flags",
}


@dataclass(frozen=True)
class Setup:
    """Arguments that all peers of a run share."""

    model: str  # of the catalogue
    folder: Path  # its safetensors
    dtype: str  # of weights and KV in the equal-precision rows
    length: int  # most tokens of one request
    batch: int  # most requests at once
    kv_bytes: int  # that `batch` requests of `length` tokens take in `dtype`
    threads: int
    place: Path  # for logs
    peers_python: Path  # where llama.cpp and OpenVINO are
    sglang_python: Path
    native: Path | None  # a llama-server built for this CPU, instead of the wheel's AVX2 build


@dataclass(frozen=True)
class Peer:
    """``group``: its rows are compared with each other (`GROUPS`)."""

    name: str
    what: str  # may say {dtype}
    group: str
    start: Callable[[Setup], AbstractContextManager[Server]]
    ours: bool = False
