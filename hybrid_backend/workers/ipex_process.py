"""The child of `hybrid_backend.workers.ipex`: attention by intel-extension-for-pytorch, one job after the other.

Runs by path in an environment of its own, so it imports torch, IPEX and the standard library, nothing of this package:

    python -I ipex_process.py SOCKET PARENT THREADS CPUS AREA...

SOCKET is a descriptor of a SOCK_SEQPACKET socket, PARENT the parent's process id, CPUS numbers joined by commas, each
AREA a descriptor of shared memory. A packet is a JSON object; the first, to the parent, is ``{"torch", "ipex"}``. A job
is ``{"job", "area", "size", "scale", "fields"}``, where ``fields`` says where in the area each tensor lies:
``[offset, dtype, shape]``. The answer is ``{"job"}`` or ``{"job", "error"}``. The program ends with the socket
or with its parent.
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
    """Attention of sequences with one query token each over their staged keys.

    IPEX's paged operator returns no LSE, and computing that apart costs more than the operator. Staging copies anyway,
    so it lays the tokens of a (sequence, KV head) side by side, and IPEX's flash attention returns both.

    ``fields``: groups ``[g, 4]`` int64, each some sequences of the same length: count, KV heads, room, tokens; q
    ``[sequences, heads, head_dim]``; kv ``[all]`` of q's dtype, of one group after the other ``[count, kv_heads,
    2 (K|V), room, head_dim]``. Written: out like q in fp32, lse ``[sequences, heads]`` fp32, natural log.
    """
    q, kv = fields["q"], fields["kv"]
    heads, dim = q.shape[1:]
    first = at = 0
    for count, kv_heads, room, tokens in fields["groups"].tolist():
        mine = slice(first, first + count)
        size = count * kv_heads * 2 * room * dim
        staged = kv[at : at + size].view(count, kv_heads, 2, room, dim)[:, :, :, :tokens]
        # The queries of a group attend the same keys: they take the place of the query length.
        grouped = q[mine].view(count, kv_heads, heads // kv_heads, dim)
        out, lse = torch.ops.torch_ipex.flash_attention(grouped, staged[:, :, 0], staged[:, :, 1], scale=scale)
        fields["out"][mine] = out.reshape(count, heads, dim)
        fields["lse"][mine] = lse.reshape(count, heads)
        first, at = first + count, at + size


def view(area: mmap.mmap, offset: int, dtype: str, shape: Sequence[int]) -> Tensor:
    """A tensor over shared memory."""
    return torch.frombuffer(area, dtype=getattr(torch, dtype), count=math.prod(shape), offset=offset).view(*shape)


def serve(link: socket.socket, areas: Sequence[int]) -> None:
    """Answer jobs until the parent hangs up."""
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
    """Ends this process, whatever it is doing, once the parent has hung up or is gone."""
    hangup = select.poll()
    hangup.register(link, 0)
    # A process that the parent forked may still hold the other end of the socket, hence the look at the parent's id.
    while not hangup.poll(1000) and os.getppid() == parent:
        pass
    os._exit(0)


def main(arguments: Sequence[str]) -> None:
    Path("/proc/self/comm").write_text("hybrid-worker")  # and of the threads to come; see `cpus.name_thread`
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
