#!/bin/sh
# Install vLLM's CPU engine from its lock file, and the CPU build of torch: install-cpu-engine.sh LOCK_FILE
# As in the Makefile, but without Triton: a gigabyte that nothing runs without a GPU (xgrammar asks for it; vLLM and torch
# do without). PYTHON: another interpreter than `python`.
set -eu
python=${PYTHON:-python}
torch=2.13.0+cpu
lock=$(mktemp)
sed '/^triton==/,/[^\\]$/d' "$1" > "$lock"
"$python" -m pip install --no-input --no-deps --require-hashes -r "$lock"
rm "$lock"
# pip's own index has the build where a mirror is set up so; PyTorch's index has it always.
"$python" -m pip install --no-input --no-deps "torch==$torch" ||
    "$python" -m pip install --no-input --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==$torch"
