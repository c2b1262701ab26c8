"""The C ABI of ``libhybrid_cpu.so`` (src/api.h), loaded with ctypes: structures, prototypes, errors."""

from __future__ import annotations

import ctypes as C
import os
import sys
from functools import cache, lru_cache
from pathlib import Path
from struct import Struct

import torch
from torch import Tensor

from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels.cpu.variants import VARIABLE, Choice, Variants, choose, measurements_folder, this_cpu

LIBRARY = Path(__file__).with_name("libhybrid_cpu.so")

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
OK, TIMEOUT, ERROR = 0, 1, -1
CHOSEN = -1  # HB_CHOSEN of src/api.h

_INT_P = C.POINTER(C.c_int)


class Cache(C.Structure):
    """K and V of one layer; strides in bytes."""

    _fields_ = [
        ("base", C.c_void_p),
        ("pages", C.c_int64),
        ("page_stride", C.c_int64),
        ("head_stride", C.c_int64),
        ("value_offset", C.c_int64),
        ("token_stride", C.c_int64),
    ]


class DigestStore(C.Structure):
    """Digests of one layer; strides in bytes."""

    _fields_ = [
        ("base", C.c_void_p),
        ("page_stride", C.c_int64),
        ("head_stride", C.c_int64),
        ("in_codes", C.c_int64),
    ]


class ByteStore(C.Structure):
    """Quantized digests of one layer; the stride in bytes."""

    _fields_ = [("base", C.c_void_p), ("page_stride", C.c_int64)]


class Model(C.Structure):
    """Shapes of the model, heads local to this rank."""

    _fields_ = [
        ("type", C.c_int32),
        ("kv_heads", C.c_int32),
        ("group", C.c_int32),
        ("head_dim", C.c_int32),
        ("page_size", C.c_int32),
        ("scale", C.c_float),
        ("bound", C.c_float),
    ]


class PartialArgs(C.Structure):
    """One partial attention of many rows."""

    _fields_ = [
        ("model", Model),
        ("cache", Cache),
        ("q", C.c_void_p),
        ("q_row_stride", C.c_int64),
        ("q_head_stride", C.c_int64),
        ("rows", C.c_int32),
        ("lists", C.c_int32),
        ("capacity", C.c_int32),
        ("ids", C.c_void_p),
        ("valid", C.c_void_p),
        ("out", C.c_void_p),
        ("out_type", C.c_int32),
        ("out_row_stride", C.c_int64),
        ("out_head_stride", C.c_int64),
        ("lse", C.c_void_p),
        ("request", C.c_void_p),
        ("generation", C.c_void_p),
        ("current", C.c_void_p),
    ]


class StepArgs(C.Structure):
    """What is the same for all layers of a decode step."""

    _fields_ = [
        ("rows", C.c_int32),
        ("sinks", C.c_int32),
        ("recent", C.c_int32),
        ("per_head", C.c_int32),
        ("aggregate", C.c_int32),
        ("candidates", C.c_int32),
        ("interval", C.c_int32),
        ("sequences", C.c_void_p),
        ("tokens", C.c_void_p),
        ("seq_lens", C.c_void_p),
        ("budgets", C.c_void_p),
        ("budget_stride", C.c_int64),
        ("skips", C.c_void_p),
        ("table", C.c_void_p),
        ("table_stride", C.c_int64),
        ("table_is_64", C.c_int32),
    ]


class LayerArgs(C.Structure):
    """Pointers of one decode layer; strides in bytes."""

    _fields_ = [
        ("q", C.c_void_p),
        ("k", C.c_void_p),
        ("v", C.c_void_p),
        ("score_q", C.c_void_p),
        ("out", C.c_void_p),
        ("lse", C.c_void_p),
        ("q_row_stride", C.c_int64),
        ("k_row_stride", C.c_int64),
        ("v_row_stride", C.c_int64),
        ("score_q_row_stride", C.c_int64),
        ("out_row_stride", C.c_int64),
    ]


class MailboxArgs(C.Structure):
    """Where the device's jobs of one layer, or of one request, lie."""

    _fields_ = [
        ("cache", Cache),
        ("rows", C.c_int32),
        ("lists", C.c_int32),
        ("capacity", C.c_int32),
        ("q", C.c_void_p),
        ("ids", C.c_void_p),
        ("counts", C.c_void_p),
        ("request", C.c_void_p),
        ("generation", C.c_void_p),
        ("current", C.c_void_p),
        ("out", C.c_void_p),
        ("lse", C.c_void_p),
        ("asked", C.c_void_p),
        ("answered", C.c_void_p),
        ("failed", C.c_void_p),
        ("layer", C.c_void_p),
        ("caches", C.c_void_p),
        ("caches_count", C.c_int32),
    ]


# In the order of src/api.h.
VERSION = 3
"""`HB_VERSION`: of what fields mean where no structure's size tells."""

STRUCTURES = (Cache, DigestStore, ByteStore, Model, PartialArgs, StepArgs, LayerArgs, MailboxArgs)

# Arguments of the operations, in the order of src/api.h; every member takes 8 bytes. A packed string costs a fifth of
# what a ctypes structure costs to make, and a decode step makes ten per layer.
_PAGED, _TEAM, _MAPS, _COPIES = "P5q", "Pq", "3P4q", "6P2q"
OPERATIONS = {
    "hb_append_tokens": Struct(f"{_PAGED}8P8q"),
    "hb_build_digests": Struct(f"{_PAGED}3P2q{_TEAM}"),
    "hb_extend_digests": Struct(f"3P9q{_TEAM}"),
    "hb_page_scores": Struct(f"6P13q{_TEAM}2d"),
    "hb_select_pages": Struct(f"10P10q{_TEAM}"),
    "hb_match_labels": Struct(f"9P8q{_TEAM}"),
    "hb_union_pages": Struct(f"6P5q{_TEAM}"),
    "hb_paged_partial": Struct(f"{_PAGED}5P7q{_TEAM}d"),
    "hb_merge_partials": Struct(f"7P6q{_TEAM}"),
    "hb_attend_prompt": Struct(f"{_PAGED}4P8q{_TEAM}d"),
    "hb_page_weights": Struct(f"{_PAGED}6P8q{_TEAM}2d"),
    "hb_note_scores": Struct(f"{_MAPS}4P5q"),
    "hb_plan_recall": Struct(f"{_MAPS}{_COPIES}12P8q"),
    "hb_copy_pages": Struct(f"4P4q{_TEAM}"),
    "hb_commit_pages": Struct(f"{_MAPS}{_COPIES}P"),
    "hb_open_pages": Struct(f"{_MAPS}3P3q"),
}

_P = C.POINTER
_PROTOTYPES: dict[str, tuple[object, list[object]]] = {
    "hb_last_error": (C.c_char_p, []),
    "hb_struct_size": (C.c_int64, [C.c_int]),
    "hb_isa_count": (C.c_int, []),
    "hb_isa_name": (C.c_char_p, [C.c_int]),
    "hb_isa_runs": (C.c_int, [C.c_int]),
    "hb_isa_best": (C.c_int, []),
    "hb_operation_count": (C.c_int, []),
    "hb_operation_name": (C.c_char_p, [C.c_int]),
    "hb_variant_count": (C.c_int, [C.c_int]),
    "hb_variant_name": (C.c_char_p, [C.c_int, C.c_int]),
    "hb_variant_runs": (C.c_int, [C.c_int, C.c_int, _P(Model)]),
    "hb_set_variant_order": (C.c_int, [C.c_int, _P(Model), _INT_P]),
    "hb_measure_variants": (C.c_int, [C.c_int, _P(Model), C.c_int, _P(C.c_double)]),
    "hb_partial": (C.c_int, [_P(PartialArgs), C.c_int]),
    "hb_read": (C.c_uint64, [C.c_void_p, C.c_int64]),
    "hb_scores": (
        C.c_int,
        [
            _P(Model),
            _P(DigestStore),
            C.c_int64,
            C.c_void_p,
            C.c_int64,
            C.c_int64,
            C.c_int32,
            C.c_int32,
            C.c_void_p,
            C.c_int64,
            C.c_int32,
            C.c_int32,
            C.c_void_p,
            C.c_int,
        ],
    ),
    "hb_quantize": (
        C.c_int,
        [_P(Model), _P(DigestStore), _P(ByteStore), C.c_int64, C.c_int32, C.c_void_p],
    ),
    "hb_byte_scores": (
        C.c_int,
        [
            _P(Model),
            _P(ByteStore),
            C.c_int64,
            C.c_void_p,
            C.c_int64,
            C.c_int64,
            C.c_int32,
            C.c_int32,
            C.c_void_p,
            C.c_int64,
            C.c_void_p,
            C.c_int,
        ],
    ),
    "hb_select": (C.c_int, [C.c_void_p, C.c_int32, C.c_int32, C.c_int32, C.c_int32, C.c_void_p]),
    "hb_pool_new": (C.c_void_p, [C.c_int, _INT_P, C.c_int, C.c_int64]),
    "hb_pool_free": (None, [C.c_void_p]),
    "hb_pool_pause": (None, [C.c_void_p, C.c_int]),
    "hb_submit": (C.c_void_p, [C.c_void_p, _P(PartialArgs)]),
    "hb_wait": (C.c_int, [C.c_void_p, C.c_double, C.c_int]),
    "hb_cancel": (None, [C.c_void_p]),
    "hb_ticket_idle": (C.c_int, [C.c_void_p]),
    "hb_ticket_span": (None, [C.c_void_p, _P(C.c_double), _P(C.c_double)]),
    "hb_ticket_free": (None, [C.c_void_p]),
    "hb_mail_new": (C.c_void_p, [C.c_void_p, _P(Model), _P(MailboxArgs), C.c_int, C.c_int]),
    "hb_mail_free": (None, [C.c_void_p]),
    "hb_mail_served": (C.c_int64, [C.c_void_p]),
    "hb_mail_error": (C.c_char_p, [C.c_void_p, C.c_int]),
    "hb_decode_new": (C.c_void_p, [_P(Model), C.c_int, C.c_int]),
    "hb_decode_free": (None, [C.c_void_p]),
    "hb_decode_set_layer": (C.c_int, [C.c_void_p, C.c_int, _P(Cache), _P(DigestStore), _P(ByteStore), C.c_void_p]),
    "hb_decode_begin": (C.c_int, [C.c_void_p, _P(StepArgs)]),
    "hb_decode_forget": (None, [C.c_void_p, C.c_int64]),
    "hb_decode_span_bytes": (C.c_int64, [C.c_void_p]),
    "hb_decode_layer": (C.c_int, [C.c_void_p, C.c_int, _P(LayerArgs), C.c_void_p, C.c_void_p, C.c_int]),
    "hb_decode_counts": (C.c_void_p, [C.c_void_p]),
    "hb_decode_selected": (C.c_int, [C.c_void_p, C.c_int, C.c_int, _P(C.c_void_p)]),
    **{name: (C.c_int, [C.c_char_p]) for name in OPERATIONS},
}


@lru_cache(maxsize=1)
def native() -> C.CDLL:
    """Load the library and have it take the fastest kernels, once.

    Raises:
        WorkerError: the library cannot be loaded; the message says what to install.
        ConfigError: `HYBRID_KERNELS` names what is unknown here.
    """
    kernel_choices()
    return _loaded()


@lru_cache(maxsize=1)
def kernel_choices() -> list[Choice]:
    """Choose the kernels of this process; see `variants`.

    Raises:
        WorkerError: the library cannot be loaded; the message says what to install.
        ConfigError: `HYBRID_KERNELS` names what is unknown here.
    """
    variants = library_variants()
    choices = choose(variants, this_cpu(), os.environ.get(VARIABLE, ""), LIBRARY, measurements_folder())
    for choice in choices:
        variants.take(choice.case, choice.order)
    return choices


def library_variants() -> Variants:
    """Return the variants of the library's operations.

    Raises:
        WorkerError: the library cannot be loaded; the message says what to install.
    """
    return Variants(_loaded(), Model)


@lru_cache(maxsize=1)
def _loaded() -> C.CDLL:
    """Load the library.

    Raises:
        WorkerError: it was not built, or this machine cannot load it; the message says what to install.
    """
    if not sys.platform.startswith("linux"):
        raise WorkerError("the native CPU kernels run on Linux only; set workers.kernel: torch")
    if not LIBRARY.exists():
        raise WorkerError(
            "the native CPU kernels were not built, because no C++ compiler was at hand: install one (Debian, Ubuntu: "
            "apt-get install build-essential) and install hybrid-backend again, or set workers.kernel: torch"
        )
    try:
        library = C.CDLL(str(LIBRARY))
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        expected = [*map(C.sizeof, STRUCTURES), *(arguments.size for arguments in OPERATIONS.values()), VERSION, 0]
        if [library.hb_struct_size(which) for which in range(len(expected))] != expected:
            raise OSError("the library was built from another version's src/api.h")
    except (OSError, AttributeError) as error:
        raise WorkerError(
            f"the native CPU kernels do not load ({error}): install hybrid-backend again on this machine, "
            "or set workers.kernel: torch"
        ) from error
    return library


def failure() -> str:
    """Why the last call of this thread failed."""
    return str(native().hb_last_error().decode())


def check(result: int) -> int:
    """Pass a result on, or raise what went wrong.

    Raises:
        WorkerError: the library refused its arguments.
    """
    if result < 0:
        raise WorkerError(f"native CPU kernel: {failure()}")
    return result


@cache
def isa_index(name: str | None) -> int:
    """Return the number of an instruction set, `CHOSEN` for None: the fastest kernels of all sets.

    Raises:
        ValueError: this machine or this build lacks it.
    """
    library = native()
    if name is None:
        return CHOSEN
    for index in range(library.hb_isa_count()):
        if library.hb_isa_name(index).decode() == name and library.hb_isa_runs(index):
            return index
    raise ValueError(f"no {name!r} kernels here; this machine runs {', '.join(isas())}")


def isas() -> list[str]:
    """List the instruction sets that were built and run here, best first."""
    library = _loaded()
    count = library.hb_isa_count()
    return [library.hb_isa_name(i).decode() for i in range(count) if library.hb_isa_runs(i)]


def cache_of(layer: Tensor) -> Cache:
    """``layer``: ``[pages, kv_heads, 2, page_size, head_dim]``, any strides but for a contiguous last dimension."""
    if layer.dim() != 5 or layer.shape[2] != 2 or layer.stride(4) != 1:
        raise ValueError(
            f"K and V of a layer must be [pages, kv_heads, 2, page_size, head_dim] with contiguous rows, not "
            f"{tuple(layer.shape)} with strides {layer.stride()}"
        )
    size = layer.element_size()
    page, head, part, token, _ = (stride * size for stride in layer.stride())
    return Cache(layer.data_ptr(), layer.shape[0], page, head, part, token)


def digests_of(digests: Tensor) -> DigestStore:
    """``digests``: ``[pages, kv_heads, 2, head_dim]`` or in codes ``[pages, kv_heads, 4 * head_dim]``; what a KV head
    has of a page is contiguous."""
    if digests.dtype == torch.uint8 and digests.dim() == 3 and digests.stride(2) == 1:
        return DigestStore(digests.data_ptr(), digests.stride(0), digests.stride(1), True)
    if digests.dim() != 4 or digests.shape[2] != 2 or digests.stride()[2:] != (digests.shape[3], 1):
        raise ValueError(
            f"digests must be [pages, kv_heads, 2, head_dim] with contiguous [2, head_dim], not "
            f"{tuple(digests.shape)} with strides {digests.stride()}"
        )
    size = digests.element_size()
    return DigestStore(digests.data_ptr(), digests.stride(0) * size, digests.stride(1) * size, False)


def byte_row(kv_heads: int, head_dim: int) -> int:
    """Bytes of a quantized page: values, scales, and padding to whole cache lines."""
    return -(-(kv_heads * 2 * (head_dim + 4)) // 64) * 64


def bytes_of(quantized: Tensor, kv_heads: int, head_dim: int) -> ByteStore:
    """``quantized``: ``[pages, >= byte_row]`` uint8, made by `digests.quantized_like`."""
    if quantized.dtype != torch.uint8 or quantized.dim() != 2 or quantized.stride(1) != 1 or quantized.stride(0) % 4:
        raise ValueError(
            f"quantized digests must be uint8 [pages, bytes], not {quantized.dtype} {tuple(quantized.shape)}"
        )
    if quantized.shape[1] < byte_row(kv_heads, head_dim):
        raise ValueError(f"a quantized digest takes {byte_row(kv_heads, head_dim)} bytes, not {quantized.shape[1]}")
    return ByteStore(quantized.data_ptr(), quantized.stride(0))


def model_of(
    dtype: torch.dtype, kv_heads: int, heads: int, head_dim: int, page_size: int, scale: float, bound: float = 1.0
) -> Model:
    """The shapes, checked as far as the library does not. ``bound``: see `digests.scores`."""
    if dtype not in DTYPES:
        raise ValueError(f"K and V must be bfloat16, float16 or float32, not {dtype}")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide among {kv_heads} KV heads")
    return Model(DTYPES[dtype], kv_heads, heads // kv_heads, head_dim, page_size, scale, bound)
