#!/bin/sh
# Build this package's wheel, its CPU kernels inside: build-wheel.sh SOURCE WHEELS
# Fails without the kernels: an image whose attention is torch's would be slow for no visible reason.
set -eu
python=${PYTHON:-python}
"$python" -m pip wheel --no-input --no-deps --wheel-dir "$2" "$1"
"$python" - "$2" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("hybrid_backend-*.whl")
names = zipfile.ZipFile(wheel).namelist()
sys.exit(None if any(name.endswith("libhybrid_cpu.so") for name in names) else f"error: {wheel} has no CPU kernels")
PYTHON
