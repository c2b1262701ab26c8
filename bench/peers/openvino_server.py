"""OpenVINO GenAI's continuous batching as an OpenAI-compatible server, as far as bench.peers needs one.

Runs in .venv-peers, so it imports nothing of this repository. One thread steps the pipeline; a request is a list of
token ids, its answer a stream of one event per token.
"""

import argparse
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai


class Engine:
    def __init__(self, model: str, batch: int, kv_bytes: int, properties: dict[str, str]) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = -(-kv_bytes // 2**30)  # GiB
        scheduler.max_num_seqs = batch
        scheduler.enable_prefix_caching = True
        self.pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.tokenizer = self.pipeline.get_tokenizer()
        self._asked: queue.Queue[tuple[list[int], int, queue.Queue[str | None]]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, prompt: list[int], tokens: int) -> "queue.Queue[str | None]":
        """Return a queue of each token's text, then None."""
        answer: queue.Queue[str | None] = queue.Queue()
        self._asked.put((prompt, tokens, answer))
        return answer

    def _run(self) -> None:
        running: list[tuple[Any, queue.Queue[str | None]]] = []
        number = 0
        while True:
            while not running or not self._asked.empty():
                prompt, tokens, answer = self._asked.get()
                config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
                number += 1
                ids = ov.Tensor(np.asarray([prompt], np.int64))
                running.append((self.pipeline.add_request(number, ids, config), answer))
            self.pipeline.step()
            for pair in list(running):
                handle, answer = pair
                while handle.can_read():
                    for output in handle.read().values():
                        for token in output.generated_ids:
                            answer.put(self.tokenizer.decode([token]) or " ")
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    answer.put(None)
                    running.remove(pair)


class Handler(BaseHTTPRequestHandler):
    engine: Engine
    alias: str

    def do_GET(self) -> None:
        body = {"data": [{"id": self.alias}]} if self.path == "/v1/models" else {}
        self._head("application/json")
        self.wfile.write(json.dumps(body).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = self.engine.ask(asked["prompt"], asked["max_tokens"])
        self._head("text/event-stream")
        tokens = 0
        while (text := answer.get()) is not None:
            tokens += 1
            self._event({"choices": [{"index": 0, "text": text}]})
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": tokens}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _head(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _event(self, body: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--alias", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--kv-bytes", type=int, required=True)
    parser.add_argument("properties", nargs="*", metavar="KEY=VALUE", help="of OpenVINO's CPU plugin")
    given = parser.parse_args()
    Handler.engine = Engine(given.model, given.batch, given.kv_bytes, dict(p.split("=", 1) for p in given.properties))
    Handler.alias = given.alias
    ThreadingHTTPServer(("127.0.0.1", given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
