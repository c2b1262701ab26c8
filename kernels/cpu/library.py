"""The native library ``libhybrid_cpu.so``: loading, errors, instruction sets, and tensors as its C structures."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels import byte_digests
from hybrid_backend.kernels.cpu import interface
from hybrid_backend.kernels.cpu.interface import CONSTANTS, STRUCTURES
from hybrid_backend.kernels.cpu.measured_orders import measurements_folder
from hybrid_backend.kernels.cpu.variants import VARIABLE, Choice, Variants, choose, this_cpu
from hybrid_backend.kernels.digest_format import CODES, MINMAX
from hybrid_backend.kernels.kv_format import head_dim_of

LIBRARY = Path(__file__).with_name("libhybrid_cpu.so")

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Number of each element type (src/api.h)."""
OK, TIMEOUT, ERROR, CHOSEN = (CONSTANTS[f"HB_{name}"] for name in ("OK", "TIMEOUT", "ERROR", "CHOSEN"))

# The members of these classes are those of src/api.h, which a type checker does not read.
Cache: Any = STRUCTURES["hb_cache"]
Digests: Any = STRUCTURES["hb_digests"]
ByteDigests: Any = STRUCTURES["hb_byte_digests"]
Model: Any = STRUCTURES["hb_model"]
PartialArgs: Any = STRUCTURES["hb_partial_args"]
StepArgs: Any = STRUCTURES["hb_step"]
LayerArgs: Any = STRUCTURES["hb_layer"]
MailboxArgs: Any = STRUCTURES["hb_mailbox"]
JudgeLayer: Any = STRUCTURES["hb_judge_layer"]
JudgeArgs: Any = STRUCTURES["hb_judge_args"]


@lru_cache(maxsize=1)
def native() -> ctypes.CDLL:
    """Load the library and set the order of its variants, once per process.

    Raises:
        WorkerError: the library cannot be loaded; the message names what to install.
        ConfigError: `HYBRID_KERNELS` has a name that is unknown on this machine.
    """
    kernel_choices()
    return _loaded()


@lru_cache(maxsize=1)
def kernel_choices() -> list[Choice]:
    """Choose the kernels of this process (`variants`).

    Raises:
        WorkerError: the library cannot be loaded; the message names what to install.
        ConfigError: `HYBRID_KERNELS` has a name that is unknown on this machine.
    """
    variants = library_variants()
    choices = choose(variants, this_cpu(), os.environ.get(VARIABLE, ""), LIBRARY, measurements_folder())
    for choice in choices:
        variants.take(choice.case, choice.order)
    return choices


def library_variants() -> Variants:
    """Return the variants of the library's operations.

    Raises:
        WorkerError: the library cannot be loaded; the message names what to install.
    """
    return Variants(_loaded(), Model)


@lru_cache(maxsize=1)
def _loaded() -> ctypes.CDLL:
    """Load the library.

    Raises:
        WorkerError: the library was not built, or this machine cannot load it; the message names what to install.
    """
    if not sys.platform.startswith("linux"):
        raise WorkerError("the native CPU kernels run on Linux only; set workers.kernel: torch")
    if not LIBRARY.exists():
        raise WorkerError(
            "the native CPU kernels were not built, because no C++ compiler was at hand: install one (Debian, Ubuntu: "
            "apt-get install build-essential) and install hybrid-backend again, or set workers.kernel: torch"
        )
    try:
        library = ctypes.CDLL(str(LIBRARY))
        interface.declare(library)
        if library.hb_interface_hash().decode() != interface.HASH:
            raise OSError("the library was built from another version's src/api.h")
    except (OSError, AttributeError) as error:
        raise WorkerError(
            f"the native CPU kernels do not load ({error}): install hybrid-backend again on this machine, "
            "or set workers.kernel: torch"
        ) from error
    return library


def failure() -> str:
    """Return the error message of this thread's last failed call."""
    return str(native().hb_last_error().decode())


def check(result: int) -> int:
    """Return the result of a call of the library if it is no error.

    Raises:
        WorkerError: the call failed.
    """
    if result < 0:
        raise WorkerError(f"native CPU kernel: {failure()}")
    return result


@cache
def isa_index(name: str | None) -> int:
    """Return the number of an instruction set; `CHOSEN`, which stands for the chosen variants, if ``name`` is None.

    Raises:
        ValueError: this machine or this build lacks the instruction set.
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


def cache_of(layer: Tensor) -> Any:
    """Describe a layer's K and V for the library.

    Args:
        layer: ``[pages, kv_heads, 2, page_size, head_dim]``, any strides but a contiguous last dimension.

    Returns:
        A `Cache`, which holds the address of ``layer`` only.

    Raises:
        ValueError: another shape, or rows that are not contiguous.
    """
    if layer.dtype is torch.int8 and layer.dim() == 5 and not layer.is_contiguous():
        raise ValueError(f"pages in 8 bits must be contiguous, not of strides {layer.stride()}")
    if layer.dim() != 5 or layer.shape[2] != 2 or layer.stride(4) != 1:
        raise ValueError(
            f"K and V of a layer must be [pages, kv_heads, 2, page_size, head_dim] with contiguous rows, not "
            f"{tuple(layer.shape)} with strides {layer.stride()}"
        )
    size = layer.element_size()
    page, head, part, token, _ = (stride * size for stride in layer.stride())
    if layer.dtype is torch.int8:
        token = head_dim_of(layer)  # The scales stand behind the rows of K and V.
        part = token * layer.shape[3]
    return Cache(layer.data_ptr(), layer.shape[0], page, head, part, token)


def digests_of(digests: Tensor) -> Any:
    """Describe a layer's digests for the library.

    Args:
        digests: ``[pages, kv_heads, 2, head_dim]`` in the cache's dtype, or in codes ``[pages, kv_heads, 4 *
            head_dim]`` uint8. One KV head's digest of one page is contiguous.

    Returns:
        A `Digests`, which holds the address of ``digests`` only.

    Raises:
        ValueError: another shape or other strides.
    """
    if digests.dtype == torch.uint8 and digests.dim() == 3 and digests.stride(2) == 1:
        return Digests(digests.data_ptr(), digests.stride(0), digests.stride(1), CODES.number)
    if digests.dim() != 4 or digests.shape[2] != 2 or digests.stride()[2:] != (digests.shape[3], 1):
        raise ValueError(
            f"digests must be [pages, kv_heads, 2, head_dim] with contiguous [2, head_dim], not "
            f"{tuple(digests.shape)} with strides {digests.stride()}"
        )
    size = digests.element_size()
    return Digests(digests.data_ptr(), digests.stride(0) * size, digests.stride(1) * size, MINMAX.number)


def byte_digests_of(copy: Tensor, kv_heads: int, head_dim: int) -> Any:
    """Describe a layer's byte digests for the library.

    Args:
        copy: ``[pages, >= page_row]`` uint8 (`digests.empty_byte_digests`).
        kv_heads: KV heads of this rank.
        head_dim: channels of a head.

    Returns:
        A `ByteDigests`, which holds the address of ``copy`` only.

    Raises:
        ValueError: another dtype or shape.
    """
    if copy.dtype != torch.uint8 or copy.dim() != 2 or copy.stride(1) != 1 or copy.stride(0) % 4:
        raise ValueError(f"byte digests must be uint8 [pages, bytes], not {copy.dtype} {tuple(copy.shape)}")
    if copy.shape[1] < (row := byte_digests.page_row(kv_heads, head_dim)):
        raise ValueError(f"the byte digests of a page take {row} bytes, not {copy.shape[1]}")
    return ByteDigests(copy.data_ptr(), copy.stride(0))


def dtype_number(dtype: torch.dtype) -> int:
    """Return the number of an element type (src/api.h).

    Raises:
        ValueError: the library lacks the dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"K and V must be bfloat16, float16 or float32, not {dtype}")
    return DTYPES[dtype]


def kv_encoding(dtype: torch.dtype) -> int:
    """Return the number of the encoding of pages whose dtype is ``dtype`` (src/api.h)."""
    return int(CONSTANTS["HB_KV_INT8" if dtype is torch.int8 else "HB_KV_PLAIN"])


def model_of(
    dtype: torch.dtype,
    kv_heads: int,
    heads: int,
    head_dim: int,
    page_size: int,
    scale: float,
    bound: float = 1.0,
    kv_dtype: torch.dtype | None = None,
) -> Any:
    """Describe a model's shapes for the library, which checks ``head_dim`` and ``page_size`` itself.

    Args:
        dtype: element type of queries, new K and V, and digests.
        kv_heads: KV heads of this rank.
        heads: query heads of this rank.
        head_dim: channels of a head.
        page_size: tokens of a page.
        scale: factor of the logits.
        bound: position of a page's score between the middle (0) and the upper end (1) of what its digest allows.
        kv_dtype: dtype of the pages; None: ``dtype``.

    Returns:
        A `Model`.

    Raises:
        ValueError: another dtype, or query heads that do not divide among the KV heads.
    """
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide among {kv_heads} KV heads")
    encoding = kv_encoding(kv_dtype or dtype)
    return Model(dtype_number(dtype), kv_heads, heads // kv_heads, head_dim, page_size, scale, bound, encoding)
