#!/bin/sh
# Install vLLM's CPU engine from its lock file, and the CPU build of torch: install-cpu-engine.sh LOCK_FILE
# As in the Makefile. PYTHON: another interpreter than `python`.
set -eu
python=${PYTHON:-python}
torch=2.13.0+cpu
"$python" -m pip install --no-input --no-deps --require-hashes -r "$1"
# pip's own index has the build where a mirror is set up so; PyTorch's index has it always.
"$python" -m pip install --no-input --no-deps "torch==$torch" ||
    "$python" -m pip install --no-input --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==$torch"
# A dependency of xgrammar. vLLM does not use it on a CPU, and it takes 1 GB, a quarter of the image.
"$python" -m pip uninstall --yes triton
