"""A reader of vLLM's message queue that sleeps: it gets every message, soon, and takes no CPU while there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hybrid_backend.engines.vllm.waiting import SLEEP

pytestmark = pytest.mark.engine

_PROBE = """
import json, os, threading, time
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from hybrid_backend.engines.vllm import waiting

def measure():
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join()

    def write():
        for number in range(20):
            time.sleep(0.05)
            writer.enqueue((number, time.perf_counter()))

    thread, began, got, late = threading.Thread(target=write), time.process_time(), [], []
    thread.start()
    for _ in range(20):
        number, sent = reader.dequeue(timeout=30)
        late.append(time.perf_counter() - sent)
        got.append(number)
    used = time.process_time() - began
    thread.join()
    return {"got": got, "late": sorted(late)[10], "used": used}

spins = measure()
for _ in range(2):  # plugins are loaded more than once
    waiting.apply()
print(json.dumps([spins, measure()]))
"""


def test_a_reader_that_sleeps_gets_every_message_soon_and_takes_no_cpu() -> None:
    environment = {**os.environ, SLEEP: "1", "VLLM_PLUGINS": "none"}
    command = [sys.executable, "-c", _PROBE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=True)
    spins, sleeps = json.loads(done.stdout.splitlines()[-1])
    assert spins["got"] == sleeps["got"] == list(range(20))
    assert sleeps["late"] < 0.01, "it is told, and does not look by itself"
    assert sleeps["used"] < spins["used"] / 3, "of a second of waiting"
