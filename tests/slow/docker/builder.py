"""Images built and run without a Docker daemon and without a registry: buildah and podman, from Debian's packages.

What Docker Hub has is made here: a Debian with Python under the very name that the Dockerfile begins with, so that the
Dockerfile is built as it is. Everything lies in one folder; nothing of the machine's own images is touched.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.slow.docker.dockerfile import DOCKER, ROOT, Instruction, instructions

TOOLS = ("buildah", "podman", "runc", "catatonit", "netavark", "debootstrap", "apt-get")
_PACKAGES = "ca-certificates,python3,python3-pip,python3-venv,python3-dev,python-is-python3"
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_PATH = f"{os.environ['PATH']}:/usr/lib/podman"
_DEBIAN = "buildah podman runc catatonit netavark debootstrap"
_PROCESSES = 32768  # podman sets its own limit to it, and nothing below it gets more


def missing() -> str | None:
    """Why nothing can be built here, with what would help."""
    lacking = [tool for tool in TOOLS if shutil.which(tool, path=_PATH) is None]
    if lacking:
        return f"no {', '.join(lacking)} here; on Debian: apt-get install {_DEBIAN}"
    if os.getuid():
        return "debootstrap needs root"
    if debian_address(_release(instructions("Dockerfile.cpu"))) is None:
        return "apt has no source of Debian here"
    return None


def debian_address(release: str) -> str | None:
    """The address from which this machine's apt gets Debian ``release``, or its own release: mirrors have all of them.
    None if it gets neither."""
    own = platform.freedesktop_os_release().get("VERSION_CODENAME")
    words = [
        "apt-get",
        "indextargets",
        "--no-release-info",
        "--format",
        "$(COMPONENT) $(RELEASE) $(REPO_URI)",
        "Created-By: Packages",
    ]
    listed = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    addresses = {name: address for component, name, address in map(str.split, listed) if component == "main"}
    return addresses.get(release) or addresses.get(own or "")


def _base_image(dockerfile: list[Instruction]) -> str:
    (name,) = {i.words[0].removeprefix("PYTHON_IMAGE=") for i in dockerfile if i.keyword == "ARG"}
    return name


def _release(dockerfile: list[Instruction]) -> str:
    return _base_image(dockerfile).rpartition("-")[2]


@dataclass(frozen=True)
class Builder:
    """Everything lies in ``folder``: storage, the base, pip's configuration."""

    folder: Path

    def run(self, *words: str | Path, seconds: float = 120) -> str:
        """Its output; an AssertionError with all that it said if it fails."""
        done = subprocess.run(
            [str(word) for word in words], env=self.environment(), capture_output=True, text=True, timeout=seconds
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()

    def environment(self) -> dict[str, str]:
        storage, engine = self.folder / "storage.conf", self.folder / "containers.conf"
        storage.write_text(
            f'[storage]\ndriver = "overlay"\nrunroot = "{self.folder}/run"\ngraphroot = "{self.folder}/images"\n'
        )
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        engine.write_text(
            # No more than this machine grants: podman asks for a million.
            f'[containers]\ndefault_ulimits = ["nofile={files}:{files}", "nproc={_PROCESSES}:{_PROCESSES}"]\n'
            # runc and no systemd: crun refuses a machine with both versions of cgroups.
            '[engine]\ncgroup_manager = "cgroupfs"\nruntime = "runc"\nevents_logger = "file"\n'
            '[network]\nnetwork_backend = "netavark"\n'
        )
        return {**os.environ, "CONTAINERS_STORAGE_CONF": str(storage), "CONTAINERS_CONF": str(engine)}

    def make_base(self, dockerfile: str) -> None:
        """A Debian with its own Python, as the image that ``dockerfile`` begins with. Python's own image lets pip
        install into the system, Debian's Python does not until its mark is gone."""
        name, release = _base_image(instructions(dockerfile)), _release(instructions(dockerfile))
        root, address = self.folder / "base", debian_address(release)
        assert address is not None
        self.run("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", release, root, address, seconds=600)
        for mark in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            mark.unlink()
        container = self.run("buildah", "from", "scratch")
        self.run("buildah", "add", "--quiet", container, root, "/", seconds=300)
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.run("buildah", "config", "--env", f"PATH={path}", container)
        self.run("buildah", "commit", "--rm", container, f"docker.io/library/{name}", seconds=300)
        shutil.rmtree(root)

    @contextmanager
    def pod(self, manifests: str) -> Iterator[str]:
        """The pod of a Deployment, whose port podman publishes; yields the name of its only container."""
        path = self.folder / "manifests.yaml"
        path.write_text(manifests)
        self.podman("kube", "play", str(path))
        try:
            yield self.podman("ps", "--all", "--filter", "name=-pod-0-", "--format", "{{.Names}}")
        finally:
            self.podman("kube", "down", str(path))

    def build(self, dockerfile: str, tag: str) -> None:
        """As docker build does it. Docker's format, because OCI's has no health check."""
        self.run(
            "buildah", "build", "--isolation", "chroot", "--layers", "--format", "docker", "--pull-never",
            "--network", "host", *self._mounts(), "--file", DOCKER / dockerfile, "--tag", tag, ROOT, seconds=1800,
        )  # fmt: skip

    def podman(self, *words: str, seconds: float = 120) -> str:
        return self.run("podman", *words, seconds=seconds)

    def command(self, name: str, image: str, flags: Sequence[str] = ()) -> list[str]:
        """`podman run` as compose.yaml has it, on the host's network."""
        return [
            "podman", "run", "--rm", "--name", name, "--network", "host", "--shm-size", "4g",
            "--cap-drop", "all", "--cap-add", "SYS_NICE", "--security-opt", "no-new-privileges",
            "--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp:exec", *self._mounts(), *flags, image,
        ]  # fmt: skip

    def _mounts(self) -> list[str]:
        """Where this machine's pip finds packages, and whom it trusts: its own business, none of the image's."""
        settings = self.folder / "pip.conf"
        found = {
            key.rpartition(".")[2]: value.strip("'\"")
            for key, _, value in (
                line.partition("=") for line in self.run("python3", "-m", "pip", "config", "list").splitlines()
            )
            if key.rpartition(".")[2] in ("index-url", "extra-index-url", "find-links", "trusted-host", "timeout")
        }
        settings.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in found.items()))
        words = {word for value in found.values() for word in value.split()}
        # An index in a folder (file://PLACE/simple) refers to files beside it.
        folders = {str(Path(word[7:]).parent) if word.startswith("file://") else word for word in words}
        local = sorted(folder for folder in folders if folder.startswith("/") and Path(folder).exists())
        mounts = [f"--volume={settings}:/etc/pip.conf:ro", *(f"--volume={folder}:{folder}:ro" for folder in local)]
        if Path(_CERTIFICATES).exists():
            settings.write_text(settings.read_text() + f"cert = {_CERTIFICATES}\n")
            mounts.append(f"--volume={_CERTIFICATES}:{_CERTIFICATES}:ro")
        return mounts
