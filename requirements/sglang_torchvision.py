"""For the demo environment of `make serve ENGINE=sglang` only: lets torchvision's CUDA build load beside a CPU torch.

SGLang imports torchvision whatever it serves. torchvision's wheel on PyPI is the CUDA build; without CUDA's libraries
its operators are not registered, and the import ends at the first one that it describes ("operator torchvision::nms
does not exist"). Declaring the two operators just before torchvision is imported is enough; nothing here calls them.
The Makefile copies this file into that environment with a .pth file that imports it at start; elsewhere nothing is
changed.
"""

import importlib.abc
import sys

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _DeclareOperators(importlib.abc.MetaPathFinder):
    """Finds nothing; the first look for torchvision is the moment to act."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in ("nms", "qnms"):
                try:
                    getattr(torch.ops.torchvision, operator)
                except (AttributeError, RuntimeError):
                    torch.library.define(f"torchvision::{operator}", _SCHEMA)
        return None


sys.meta_path.insert(0, _DeclareOperators())
