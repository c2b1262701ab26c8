"""The process of the IPEX worker (`hybrid_backend.workers.ipex`), which runs attention jobs one after the other.

The file runs by path in an environment of its own, so it imports only torch, IPEX and the standard library:

    python -I ipex_process.py SOCKET PARENT THREADS CPUS AREA...

* SOCKET: descriptor of a SOCK_SEQPACKET socket. Each packet is a JSON object.
* PARENT: process id of the parent. The program ends with its parent, or when the parent closes the socket.
* THREADS, CPUS: number of OpenMP threads; CPUs that the threads may run on, joined by commas.
* AREA: descriptor of shared memory.

The first packet is ``{"torch", "ipex"}``, the versions, to the parent. A job is ``{"job", "area", "size", "scale",
"fields"}``; ``fields`` maps a tensor's name to ``[offset, dtype, shape]`` in the area. The answer is ``{"job"}`` or
``{"job", "error"}``.
"""

from __future__ import annotations

import importlib
import json
import math
import mmap
import os
import select
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

MESSAGE_BYTES = 65536


def attend(fields: Mapping[str, Tensor], scale: float) -> None:
    """Attend one query token per sequence over the K and V that the parent staged in shared memory.

    IPEX's paged operator returns no LSE. The parent stages the tokens of each (sequence, KV head) contiguously, so that
    IPEX's flash attention applies, which returns the LSE.

    Args:
        fields: tensors by name.
            ``groups``: ``[groups, 4]`` int64; a group has sequences of one length. Columns: number of sequences,
            KV heads, tokens that the staged pages have room for, tokens to attend.
            ``q``: ``[sequences, heads, head_dim]``.
            ``kv``: flat, dtype of ``q``; per group ``[sequences, kv_heads, 2 (K, V), room, head_dim]``.
            ``out``: like ``q`` in fp32, written.
            ``lse``: ``[sequences, heads]`` fp32, natural logarithm, written.
        scale: factor of the attention logits.
    """
    q, kv = fields["q"], fields["kv"]
    heads, dim = q.shape[1:]
    first = offset = 0
    for count, kv_heads, room, tokens in fields["groups"].tolist():
        rows = slice(first, first + count)
        size = count * kv_heads * 2 * room * dim
        staged = kv[offset : offset + size].view(count, kv_heads, 2, room, dim)[:, :, :, :tokens]
        # The query heads that share a KV head attend the same keys, so these query heads are passed as query tokens.
        grouped = q[rows].view(count, kv_heads, heads // kv_heads, dim)
        out, lse = torch.ops.torch_ipex.flash_attention(grouped, staged[:, :, 0], staged[:, :, 1], scale=scale)
        fields["out"][rows] = out.reshape(count, heads, dim)
        fields["lse"][rows] = lse.reshape(count, heads)
        first, offset = first + count, offset + size


def view(area: mmap.mmap, offset: int, dtype: str, shape: Sequence[int]) -> Tensor:
    """Return a tensor over shared memory. ``offset`` is in bytes, ``dtype`` the name of a torch dtype."""
    return torch.frombuffer(area, dtype=getattr(torch, dtype), count=math.prod(shape), offset=offset).view(*shape)


def serve(link: socket.socket, areas: Sequence[int]) -> None:
    """Answer jobs until the parent closes the socket. ``areas`` are the descriptors of the shared memory."""
    maps: dict[int, mmap.mmap] = {}
    while packet := link.recv(MESSAGE_BYTES):
        job = json.loads(packet)
        answer: dict[str, object] = {"job": job["job"]}
        try:
            area = maps.get(job["area"])
            if area is None or len(area) < job["size"]:
                area = maps[job["area"]] = mmap.mmap(areas[job["area"]], job["size"])
            fields = {name: view(area, *field) for name, field in job["fields"].items()}
            attend(fields, job["scale"])
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"[:2000]
        link.send(json.dumps(answer).encode())


def end_with(parent: int, link: socket.socket) -> None:
    """Wait until the parent has closed the socket or has ended, then end this process at once."""
    hangup = select.poll()
    hangup.register(link, 0)
    # A child of the parent may still hold the parent's end of the socket open, so the parent's id is checked as well.
    while not hangup.poll(1000) and os.getppid() == parent:
        pass
    os._exit(0)


def main(arguments: Sequence[str]) -> None:
    """Run the program with the command-line arguments that the module's docstring lists."""
    # `cpus.name_thread` gives worker threads the same name. The process's later threads inherit the name.
    Path("/proc/self/comm").write_text("hybrid-worker")
    link = socket.socket(fileno=int(arguments[0]))
    threading.Thread(target=end_with, args=(int(arguments[1]), link), daemon=True).start()
    ipex = importlib.import_module("intel_extension_for_pytorch")
    os.sched_setaffinity(0, [int(cpu) for cpu in arguments[3].split(",")])
    torch.set_num_threads(int(arguments[2]))
    link.send(json.dumps({"torch": torch.__version__, "ipex": ipex.__version__}).encode())
    with torch.inference_mode():
        serve(link, [int(descriptor) for descriptor in arguments[4:]])


if __name__ == "__main__":
    main(sys.argv[1:])
