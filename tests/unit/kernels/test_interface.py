"""The C ABI as `kernels.cpu.interface` reads it from the headers."""

from __future__ import annotations

import ctypes

import pytest

from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels import cpu
from hybrid_backend.kernels.cpu import interface, library
from hybrid_backend.kernels.cpu.build import HEADERS
from hybrid_backend.kernels.cpu.interface import CONSTANTS, PACKERS, PROTOTYPES, STRUCTURES
from hybrid_backend.kernels.digest_format import CODES, MINMAX, MINMAX_INT8
from hybrid_backend.kernels.operations import Counters


def test_structures_and_prototypes_are_those_of_the_headers() -> None:
    assert STRUCTURES["hb_byte_digests"]._fields_ == [("base", ctypes.c_void_p), ("page_stride", ctypes.c_int64)]
    assert STRUCTURES["hb_partial_args"]._fields_[0] == ("model", STRUCTURES["hb_model"])
    assert PROTOTYPES["hb_last_error"] == (ctypes.c_char_p, [])
    assert PROTOTYPES["hb_pool_free"] == (None, [ctypes.c_void_p])
    assert PROTOTYPES["hb_wait"] == (ctypes.c_int, [ctypes.c_void_p, ctypes.c_double, ctypes.c_int])
    assert PROTOTYPES["hb_decode_begin"][1] == [ctypes.c_void_p, ctypes.POINTER(STRUCTURES["hb_step"])]
    assert PACKERS["hb_note_scores"].format == "PPPqqqqPPPPqqqqq"


def test_a_packed_argument_has_the_size_of_its_structure() -> None:
    assert len(PACKERS) == HEADERS[1].read_text().count("_args* args);")
    for name, packer in PACKERS.items():
        assert packer.size == ctypes.sizeof(STRUCTURES[f"{name}_args"]), name


def test_kernels_count_in_the_columns_of_the_contract() -> None:
    for column, name in enumerate(Counters._fields[:7]):
        assert CONSTANTS[f"HB_{name.upper()}"] == column


def test_kernels_number_digest_formats_as_the_contract_does() -> None:
    for digest_format in (MINMAX, CODES, MINMAX_INT8):
        assert CONSTANTS[f"HB_{digest_format.name.upper()}"] == digest_format.number


@pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))
def test_a_library_that_was_built_from_other_headers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "HASH", "of another api.h")
    library._loaded.cache_clear()
    try:
        with pytest.raises(WorkerError, match=r"another version's src/api\.h"):
            library.isas()
    finally:
        library._loaded.cache_clear()
