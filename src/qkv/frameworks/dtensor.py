"""torch's DTensor: what it cannot do is told with a next step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from qkv.errors import FrameworkError


def is_dtensor(x: Any) -> bool:
    """Whether several processes hold its parts; asked by name, since few have that module."""
    return type(x).__name__ == "DTensor"


class DTensorErrors(AbstractContextManager[None]):
    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            raise FrameworkError(
                "torch has no rule for these DTensors here: attend to what each process holds, "
                "x.to_local(), or by torch.distributed.tensor.experimental.local_map; where the "
                "keys are shared out, by qkv.cluster.torch.attend"
            ) from error
