"""What pyproject.toml cannot say: two top-level folders are installed inside `hybrid_backend`, and the CPU kernels are
one shared library that `kernels/cpu/build.py` makes."""

import importlib.util
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

INSIDE = ("kernels", "configs")
HERE = Path(__file__).resolve().parent


def installed_name(folder: str) -> str:
    return f"hybrid_backend.{folder}" if folder.split(".")[0] in INSIDE else folder


def kernel_builder():
    spec = importlib.util.spec_from_file_location("build_cpu_kernels", HERE / "kernels" / "cpu" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildKernels(build_ext):
    """Runs build.py. Without a compiler the package installs all the same: attention on the CPU is then torch's."""

    def run(self) -> None:
        builder = kernel_builder()
        in_place = self.inplace or getattr(self, "editable_mode", False)
        folder = HERE / "kernels" / "cpu" if in_place else Path(self.build_lib, "hybrid_backend", "kernels", "cpu")
        try:
            with tempfile.TemporaryDirectory() as objects:
                made = builder.build(folder / builder.LIBRARY, Path(objects))
            print(f"hybrid-backend: CPU kernels built for {', '.join(made)}", file=sys.stderr)
        except builder.BuildError as error:
            print(f"hybrid-backend: warning: {error}", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        library = Path(self.build_lib, "hybrid_backend", "kernels", "cpu", kernel_builder().LIBRARY)
        return [str(library)] if library.exists() else []

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(HERE)) for path in kernel_builder().sources()]


class AnyPython(bdist_wheel):
    """The library has a plain C ABI: one wheel for every Python on the platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


folders = find_packages(include=["hybrid_backend*", *(f"{name}*" for name in INSIDE)])
setup(
    packages=[installed_name(folder) for folder in folders],
    ext_modules=[Extension("hybrid_backend.kernels.cpu.libhybrid_cpu", [])],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPython},
)
