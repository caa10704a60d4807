"""What a layer is given must be tensors."""

from __future__ import annotations

from typing import Any

import torch

from qkv.errors import DtypeError


def check_tensors(**given: Any) -> None:
    """Refuse what is no tensor, by its name: a layer's parameters would not meet it."""
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise DtypeError(
                f"{name} must be a torch tensor, not {type(x).__name__}: pass "
                f"torch.as_tensor({name})"
            )
