"""Serving throughput and latency of OpenAI-compatible endpoints, side by side, by request rate.

    python -m bench.throughput --serve [--rates 0.25,0.5,1,inf] [--input 2048] [--output 64] [--set KEY=VALUE]
    python -m bench.throughput --endpoint stock=http://host:8000 --endpoint hybrid=http://host:8001 --tokenizer MODEL

The load comes from the engine's own client: `vllm bench serve`, or SGLang's `sglang.benchmark.serving` where only
SGLang is installed. Every endpoint gets the same prompts at the same moments, one endpoint at a time, in turns that
change their order. No prompt is sent twice to one endpoint, so its prefix cache has nothing to give. Writes
throughput.json, throughput.md and throughput.png into bench/out/.
"""
