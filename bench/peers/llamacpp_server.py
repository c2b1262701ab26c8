"""llama.cpp's server out of the xllamacpp wheel. Runs in .venv-peers, so it imports nothing of this repository.

Takes those options of `llama-server` that bench/peers/llamacpp.py gives.
"""

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "alias", "cache-type-k", "cache-type-v"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "threads", "ctx-size", "parallel"):
        parser.add_argument(f"--{name}", required=True, type=int)
    given = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = given.model
    params.model_alias = {given.alias}
    params.hostnames = ["127.0.0.1"]
    params.port = given.port
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given.threads
    params.n_ctx, params.n_parallel = given.ctx_size, given.parallel
    for part in ("k", "v"):
        kind = getattr(given, f"cache_type_{part}").upper()
        setattr(params, f"cache_type_{part}", getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kind}"))
    params.cache_ram_mib = 0
    server = xllamacpp.Server(params)
    print(f"{server.listening_address}: {xllamacpp.get_system_info()}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
