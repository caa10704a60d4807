"""The state of a descent on disk, so that it can go on after an interruption."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from qkv.errors import QkvError

if TYPE_CHECKING:
    from qkv.database.learn.descent import Descent


class CheckpointError(QkvError, ValueError):
    """The file to resume from is damaged, or belongs to other keys, pairs or settings."""


def save(run: Descent, path: Path) -> None:
    """The state after an epoch, as one safetensors file that is there whole or not at all."""
    from safetensors.numpy import save as packed

    state = {
        "fingerprint": run.fingerprint(),
        "epoch": run.epoch,
        "step": run.step,
        "seconds": run.seconds(),
        "losses": run.losses,
        "best_epoch": run.best_epoch,
        "best_mark": list(run.best_mark),
    }
    groups = {"now": run.now, "first": run.first, "second": run.second}
    if run.best_epoch != run.epoch:
        groups["best"] = dict(run.best)
    tensors = {f"{g}/{n}": array for g, group in groups.items() for n, array in group.items()}
    if run.hard is not None:
        tensors["hard"] = run.hard
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(packed(tensors, {"state": json.dumps(state)}))
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def load(run: Descent, path: Path) -> None:
    """Go on from the state that `save` kept, if it is of the same task and settings."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np") as file:
            state = json.loads((file.metadata() or {}).get("state", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be resumed from ({error}): remove it") from error
    if not isinstance(state, dict) or state.get("fingerprint") != run.fingerprint():
        raise CheckpointError(
            f"{path} is of other keys, pairs or settings: remove it, or name another file"
        )
    for name, group in (("now", run.now), ("first", run.first), ("second", run.second)):
        for own in group:
            group[own] = tensors[f"{name}/{own}"]
    for name in ("epoch", "step", "losses", "best_epoch"):
        setattr(run, name, state[name])
    run.best_mark = (state["best_mark"][0], state["best_mark"][1])
    run.began = time.perf_counter() - state["seconds"]
    kept = "now" if run.best_epoch == run.epoch else "best"
    run.best = {name: tensors[f"{kept}/{name}"].copy() for name in run.now}
    run.hard = tensors.get("hard")
