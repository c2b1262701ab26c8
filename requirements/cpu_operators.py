"""For `make test ENGINE_VERSION=...` of a vLLM that has no CPU build yet: its Python sources on the compiled operators
of the locked CPU build, so that the CPU engine's own platform, worker, model runner and scheduler can be tried.

    python cpu_operators.py keep FOLDER      before the locked build is uninstalled
    python cpu_operators.py lay FOLDER       after the CUDA build was installed without its dependencies

vLLM knows a CPU build by "cpu" in its version, so that is added to the package's metadata. For tests alone.
"""

import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path


def keep(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for file in package().glob("_C*.so"):
        shutil.copy2(file, folder)


def lay(folder: Path) -> None:
    try:
        found = distribution("vllm")
    except PackageNotFoundError:
        return  # a CPU build
    for file in folder.glob("_C*.so"):
        shutil.copy2(file, package())
    metadata = Path(str(found.locate_file(f"vllm-{found.version}.dist-info/METADATA")))
    text = metadata.read_text()
    metadata.unlink()  # rather than changed: pip may have linked it
    metadata.write_text(re.sub(r"^Version: (.*)$", as_cpu_build, text, count=1, flags=re.MULTILINE))


def as_cpu_build(line: re.Match[str]) -> str:
    """A version of main ends with +COMMIT already, or with +cpu."""
    return line[0] if "cpu" in line[1] else f"{line[0]}{'.' if '+' in line[1] else '+'}cpu"


def package() -> Path:
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


if __name__ == "__main__":
    {"keep": keep, "lay": lay}[sys.argv[1]](Path(sys.argv[2]))
