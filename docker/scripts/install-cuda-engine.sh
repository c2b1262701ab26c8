#!/bin/sh
# Install vLLM's CUDA engine, which brings its torch and CUDA libraries: install-cuda-engine.sh REQUIREMENTS
set -eu
python=${PYTHON:-python}
"$python" -m pip install --no-input -r "$1"
