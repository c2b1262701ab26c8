"""Decode and prefill rates of other CPU servers (llama.cpp, OpenVINO, stock engines) and of ours, by depth and batch.

    python -m bench.peers [--quick] [--peers NAME,...] [--depths 200,2000,7500] [--batches 1,4] [--dtype float32]
    python -m bench.peers --peers int8,int4              # quantised weights, compared with rows of as many bits
    python -m bench.peers --model qwen2.5-coder-0.5b-instruct --depths 16000,32000 --batches 1 --native llama-server
    python -m bench.peers --hold --peers vllm            # start it, print its address, serve until Ctrl-C
    python -m bench.peers --endpoint vllm=http://127.0.0.1:8000 --endpoint hybrid-sparse=http://127.0.0.1:8001

Every peer is an OpenAI-compatible server with the same threads, asked by the same client, one at a time, in turns that
change their order; the others are up and idle. A prompt is a list of token ids that no server has seen: its time to the
first token gives the prefill rate. Then the same prompts are asked again, a batch at once: they come from each server's
prefix cache, so that what is timed is decoding. The median time that a stream takes for eight tokens gives its rate.
Prints a markdown table and writes it and all samples into bench/out/. A peer that cannot be started is named with the
reason; rows in which we lose are marked. See docs/lab/peers.md.
"""
