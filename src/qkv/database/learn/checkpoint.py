"""The state of a descent on disk, so that it can go on after an interruption."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from qkv.errors import QkvError

if TYPE_CHECKING:
    from qkv.database.learn.descent import GradientDescent


class CheckpointError(QkvError, ValueError):
    """The file to resume from is damaged, or belongs to other keys, pairs or settings."""


def save_checkpoint(run: GradientDescent, path: Path) -> None:
    """The state after an epoch, as one safetensors file that is there whole or not at all."""
    from safetensors.numpy import save as packed

    state = {
        "fingerprint": run.compute_fingerprint(),
        "epoch": run.epoch,
        "step": run.step,
        "seconds": run.elapsed_seconds(),
        "losses": run.losses,
        "best_epoch": run.best_epoch,
        "best_mark": list(run.best_metrics),
    }
    groups = {"now": run.parameters, "first": run.first_moments, "second": run.second_moments}
    if run.best_epoch != run.epoch:
        groups["best"] = dict(run.best_parameters)
    tensors = {f"{g}/{n}": array for g, group in groups.items() for n, array in group.items()}
    if run.hard_negatives is not None:
        tensors["hard"] = run.hard_negatives
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(packed(tensors, {"state": json.dumps(state)}))
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def load_checkpoint(run: GradientDescent, path: Path) -> None:
    """Go on from the state that `save_checkpoint` kept, if it is of the same task and settings."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np") as file:
            state = json.loads((file.metadata() or {}).get("state", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be resumed from ({error}): remove it") from error
    if not isinstance(state, dict) or state.get("fingerprint") != run.compute_fingerprint():
        raise CheckpointError(
            f"{path} is of other keys, pairs or settings: remove it, or name another file"
        )
    for name, group in (
        ("now", run.parameters),
        ("first", run.first_moments),
        ("second", run.second_moments),
    ):
        for own in group:
            group[own] = tensors[f"{name}/{own}"]
    for name in ("epoch", "step", "losses", "best_epoch"):
        setattr(run, name, state[name])
    run.best_metrics = (state["best_mark"][0], state["best_mark"][1])
    run.start_time = time.perf_counter() - state["seconds"]
    kept = "now" if run.best_epoch == run.epoch else "best"
    run.best_parameters = {name: tensors[f"{kept}/{name}"].copy() for name in run.parameters}
    run.hard_negatives = tensors.get("hard")
