"""The peers by name, in the order of the table."""

from __future__ import annotations

from collections.abc import Sequence

from bench.peers import llamacpp, openvino, sglang, vllm
from bench.peers.peer import Peer

PEERS = (
    Peer("hybrid-sparse", "{dtype}, our default configuration", True, vllm.sparse, ours=True),
    Peer("hybrid-dense", "{dtype}, `sparse: never`", True, vllm.dense, ours=True),
    Peer("llamacpp", "{dtype} weights, KV f16 (its default)", True, llamacpp.own_kv),
    Peer("llamacpp-same-kv", "{dtype} weights and KV", True, llamacpp.same_kv),
    Peer("vllm", "{dtype}, compiled, all cores, Intel's OpenMP preloaded", True, vllm.stock),
    Peer("sglang", "{dtype}, torch_native", True, sglang.stock),
    Peer("openvino", "F16 file, computed in {dtype}, KV {dtype}", True, openvino.equal),
    Peer("llamacpp-q8", "Q8_0 weights, KV f16", False, llamacpp.q8),
    Peer("llamacpp-shipped", "the catalogue's GGUF (4 bits), KV f16", False, llamacpp.shipped),
    Peer("openvino-shipped", "the catalogue's GGUF (4 bits), its own defaults", False, openvino.shipped),
    Peer("vllm-untouched", "no flag: one core kept free", False, vllm.untouched),
    Peer("hybrid-serve", "`hybrid serve MODEL`, no flag", False, vllm.served, ours=True),
)


def choose(named: str) -> list[Peer]:
    """From a comma-separated list, in the table's order; ``equal`` and ``all`` stand for groups.

    Raises:
        ValueError: a name that there is not.
    """
    names = [name.strip() for name in named.split(",")]
    groups = {"equal": [p.name for p in PEERS if p.equal], "all": [p.name for p in PEERS]}
    wanted = {one for name in names for one in groups.get(name, [name])}
    known = {peer.name for peer in PEERS}
    if unknown := sorted(wanted - known):
        raise ValueError(f"{unknown[0]!r} is no peer; there are: {', '.join([*groups, *sorted(known)])}")
    return [peer for peer in PEERS if peer.name in wanted]


def describe(name: str, dtype: str, others: Sequence[Peer] = PEERS) -> str:
    """What a row says beside the name; empty for a server that somebody else started under a name of their own."""
    return next((peer.what.format(dtype=dtype) for peer in others if peer.name == name), "")
