#!/bin/sh
# Install NIXL and vLLM's router beside the engine from their lock file: install-transfer.sh LOCK_FILE
# Without their dependencies: what they name is the engine's.
set -eu
python=${PYTHON:-python}
"$python" -m pip install --no-input --no-deps --require-hashes -r "$1"
