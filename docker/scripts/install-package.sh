#!/bin/sh
# Install the wheel made by build-wheel.sh beside the engine: install-package.sh WHEELS [pip options]
# Without its dependencies: the engine's requirements hold them.
set -eu
python=${PYTHON:-python}
wheels=$1
shift
"$python" -m pip install --no-input --no-deps "$@" "$wheels"/hybrid_backend-*.whl
