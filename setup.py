"""The one thing pyproject.toml cannot say: two top-level folders are installed inside `hybrid_backend`."""

from setuptools import find_packages, setup

INSIDE = ("kernels", "configs")


def installed_name(folder: str) -> str:
    return f"hybrid_backend.{folder}" if folder.split(".")[0] in INSIDE else folder


folders = find_packages(include=["hybrid_backend*", *(f"{name}*" for name in INSIDE)])
setup(packages=[installed_name(folder) for folder in folders])
