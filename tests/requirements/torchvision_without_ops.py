"""Lets torchvision's Python parts be imported beside a torch that its operators were not built for.

The compiled operators of its wheel need another build of torch. What ACT uses of torchvision (ResNet,
FrozenBatchNorm2d, transforms) is plain PyTorch; only the declarations of two operators are missed at import.
To be imported when Python starts: a line in a ``.pth`` file.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from typing import Any

# A declaration lives as long as the object that made it.
_kept: list[Any] = []


class _Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        if not hasattr(torch.ops.torchvision, "nms"):
            library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept.append(library)
        return importlib.util.find_spec(name)


sys.meta_path.insert(0, _Declare())
