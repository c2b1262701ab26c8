"""The manifests of deploy/, rendered by kustomize as a cluster would get them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.slow.docker.dockerfile import ROOT

DEPLOY = ROOT / "deploy"
OVERLAYS = ("cpu", "gpu")
COMPONENTS = ("monitoring", "numa")


def kustomize(folder: Path) -> str:
    """The documents of a kustomization, as ``kubectl apply -k`` would send them."""
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(folder: Path) -> dict[str, dict[str, Any]]:
    """The documents of a kustomization by kind."""
    documents = list(yaml.safe_load_all(kustomize(folder)))
    by_kind = {document["kind"]: document for document in documents}
    assert len(by_kind) == len(documents), "two documents of one kind"
    return by_kind


def pod(documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = documents["Deployment"]["spec"]["template"]["spec"]
    return found


def container(documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (found,) = pod(documents)["containers"]
    return dict(found)
