"""The peers by name, in the order of the table."""

from __future__ import annotations

from typing import NoReturn

from bench.peers import llamacpp, openvino, sglang, vllm
from bench.peers.peer import GROUPS, Peer, Setup

PEERS = (
    Peer("hybrid-sparse", "{dtype}, our default configuration", "equal", vllm.sparse, ours=True),
    Peer("hybrid-dense", "{dtype}, `sparse: never`", "equal", vllm.dense, ours=True),
    Peer("llamacpp", "{dtype} weights, KV f16 (its default)", "equal", llamacpp.own_kv),
    Peer("llamacpp-same-kv", "{dtype} weights and KV", "equal", llamacpp.same_kv),
    Peer("vllm", "{dtype}, compiled, all cores, Intel's OpenMP preloaded", "equal", vllm.stock),
    Peer("sglang", "{dtype}, torch_native", "equal", sglang.stock),
    Peer("openvino", "F16 file, computed in {dtype}, KV {dtype}", "equal", openvino.equal),
    Peer("hybrid-kv8", "{dtype}, our default configuration, `kv_dtype: int8`", "kv8", vllm.sparse_kv8, ours=True),
    Peer("hybrid-dense-kv8", "{dtype}, `sparse: never`, `kv_dtype: int8`", "kv8", vllm.dense_kv8, ours=True),
    Peer("llamacpp-kv8", "{dtype} weights, KV q8_0", "kv8", llamacpp.kv8),
    Peer("openvino-kv8", "F16 file, computed in {dtype}, KV u8 (its default)", "kv8", openvino.kv8),
    Peer("hybrid-int8", "W8A8, all else bfloat16", "int8", vllm.sparse_int8, ours=True),
    Peer("llamacpp-q8", "Q8_0, KV f16", "int8", llamacpp.q8),
    Peer("vllm-int8", "W8A8, all else bfloat16", "int8", vllm.stock_int8),
    Peer("openvino-q8", "Q8_0 file, its own defaults (KV in 8 bits)", "int8", openvino.q8),
    Peer("hybrid-int4", "W4A16, all else bfloat16", "int4", vllm.sparse_int4, ours=True),
    Peer("llamacpp-shipped", "the catalogue's GGUF, KV f16", "int4", llamacpp.shipped),
    Peer("vllm-int4", "W4A16, all else bfloat16", "int4", vllm.stock_int4),
    Peer("openvino-shipped", "the catalogue's GGUF, its own defaults (KV in 8 bits)", "int4", openvino.shipped),
    Peer("hybrid-serve", "`hybrid serve MODEL`, no flag", "untouched", vllm.served, ours=True),
    Peer("vllm-untouched", "no flag: one core kept free", "untouched", vllm.untouched),
)


def choose(named: str) -> list[Peer]:
    """Return the peers of a comma-separated list, in the table's order; a group and ``all`` stand for their peers.

    Raises:
        ValueError: a name that there is not.
    """
    names = [name.strip() for name in named.split(",")]
    groups = {group: [peer.name for peer in PEERS if peer.group == group] for group in GROUPS}
    groups["all"] = [peer.name for peer in PEERS]
    wanted = {one for name in names for one in groups.get(name, [name])}
    known = {peer.name for peer in PEERS}
    if unknown := sorted(wanted - known):
        raise ValueError(f"{unknown[0]!r} is no peer; there are: {', '.join([*groups, *sorted(known)])}")
    return [peer for peer in PEERS if peer.name in wanted]


def find(name: str) -> Peer:
    """Return a peer of `PEERS`; another name is a server that the user started, compared with the equal peers."""
    return next((peer for peer in PEERS if peer.name == name), Peer(name, "", "equal", _not_ours_to_start))


def _not_ours_to_start(setup: Setup) -> NoReturn:
    raise RuntimeError("given as --endpoint")
