"""Train every task, attention and seed, and test each model at 1 to 64 times its length.

    python -m examples.recall.train --out build/examples/recall --jobs 6 --seconds 540

`results.jsonl` in the folder gets one line for each finished cell (task, attention, seed). Cells
that have a line are skipped, so the command continues where an earlier one stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, multiprocessing, nn

from examples.recall.models import ATTENTIONS, HEADS, WIDTH, Stack
from examples.recall.tasks import LAYERS, NO_TARGET, TASKS, Batch

Cell = tuple[str, str, int]
"""Task, attention, seed."""
BATCHES_PER_DRAW = 8
"""Batches that are drawn together, with one length."""
TEST_SEED = 1_000_000
MAX_TOKENS_PER_CALL = 16_384
"""Tokens of each run in one call of a test."""
PROBED_QUERIES = 64
GROUPS = (("mqar", "mqmtar", "copy", "reverse", "noisy", "similar"), ("hops",), ("sort",))
"""Tasks that train in one stack. A time limit leaves out the last groups first."""
TIMED_STEPS = 16
CURVE_POINTS = 40


@dataclass(frozen=True)
class Settings:
    """How models are trained and tested."""

    steps: int = 4000
    batch: int = 64
    length: int = 64
    rate: float = 2e-3
    factors: tuple[int, ...] = (1, 2, 4, 16, 64)
    """Lengths of the tests, as multiples of the training length."""
    test_tokens: int = 32_768
    """Tokens of the test at each length, of each run."""
    engine: str | None = None
    """The engine of the training. "fastest" measures the kernels and the dense engine."""
    device: str = "cpu"


@dataclass(frozen=True)
class Job:
    """The runs that train in one stack: cells of one attention, whose models have equal layers."""

    attention: str
    layers: int
    runs: tuple[tuple[str, int], ...]
    """Task and seed of each run."""


def list_jobs(
    tasks: Iterable[str], attentions: Iterable[str], seeds: Iterable[int], finished: set[Cell]
) -> list[Job]:
    """Return the jobs of all cells that are not finished: all attentions of a group, then the next.

    So a time limit leaves whole groups with all attentions.
    """
    tasks, attentions, seeds = set(tasks), list(attentions), list(seeds)
    jobs = []
    for group in GROUPS:
        for attention in attentions:
            runs = tuple(
                (task, seed)
                for task in group
                for seed in seeds
                if task in tasks and (task, attention, seed) not in finished
            )
            if runs:
                jobs.append(Job(attention, LAYERS[group[0]], runs))
    return jobs


class BatchSource:
    """Batches for all runs of a job, (runs, batch, …). All attentions get the same ones."""

    def __init__(self, job: Job, device: str, first_seed: int = 0) -> None:
        self.generators = {
            run: Generator(device).manual_seed(first_seed + 1000 * index_of_task(run[0]) + run[1])
            for run in job.runs
        }

    def draw(self, count: int, length: int) -> Batch:
        parts = [TASKS[task](count, length, g) for (task, _), g in self.generators.items()]
        return Batch(*(torch.stack(x) for x in zip(*parts, strict=True)))


def index_of_task(task: str) -> int:
    return list(TASKS).index(task)


def choose_training_engine(stack: Stack, job: Job, settings: Settings) -> str | None:
    """Return the engine of the settings, or the one that takes the shortest time for a step."""
    if settings.engine != "fastest":
        return settings.engine
    batch = BatchSource(job, settings.device, TEST_SEED).draw(settings.batch, settings.length)
    seconds: dict[str | None, float] = {}
    for engine in (None, "dense"):
        try:
            for step in range(2 * TIMED_STEPS):
                if step == TIMED_STEPS:
                    wait_for_device(settings.device)
                    began = time.time()
                compute_losses(stack, batch, engine).sum().backward()
            wait_for_device(settings.device)
            seconds[engine] = time.time() - began
        except (RuntimeError, NotImplementedError) as error:
            print(f"{job.attention} with engine {engine}: {error}"[:500], file=sys.stderr)
        stack.zero_grad()
    fastest = min(seconds, key=lambda engine: seconds[engine])
    words = ", ".join(f"{x or 'auto'} {1000 * y / TIMED_STEPS:.1f} ms" for x, y in seconds.items())
    print(f"{job.attention}: {words}", file=sys.stderr, flush=True)
    return fastest


def wait_for_device(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def train_stack(job: Job, settings: Settings, deadline: float) -> tuple[Stack, list[list[float]]]:
    """Return the trained stack, and the losses of each run along the training.

    Raise TimeoutError as soon as the training will not end before the deadline.
    """
    kind, device = ATTENTIONS[job.attention], settings.device
    stack = Stack(kind, [seed for _, seed in job.runs], job.layers).to(device)
    engine = choose_training_engine(stack, job, settings)
    fused = device == "cuda"
    optimizer = torch.optim.Adam(stack.parameters(), settings.rate, (0.9, 0.98), fused=fused)
    source = BatchSource(job, device)
    lengths = Generator().manual_seed(0)
    steps, curve = settings.steps, []
    recent, began = torch.zeros(len(job.runs), device=device), time.time()
    between = max(steps // CURVE_POINTS, 1)
    for step in range(steps):
        if step % BATCHES_PER_DRAW == 0:
            # Shorter sequences are trained too: a fixed length could be learned by heart.
            eighths = int(torch.randint(2, 9, (), generator=lengths))
            length = max(settings.length * eighths // 64, 1) * 8
            drawn = source.draw(settings.batch * BATCHES_PER_DRAW, length)
            parts = [x.split(settings.batch, 1) for x in drawn]
        batch = Batch(*(part[step % BATCHES_PER_DRAW] for part in parts))
        for group in optimizer.param_groups:
            group["lr"] = settings.rate * schedule_rate(step, steps)
        losses = compute_losses(stack, batch, engine)
        optimizer.zero_grad()
        losses.sum().backward()
        gradient = stack.numbers.grad
        assert gradient is not None
        gradient.nan_to_num_(0.0, 0.0, 0.0)
        gradient.mul_(1 / gradient.norm(dim=1, keepdim=True).clamp_min(1.0))
        optimizer.step()
        recent += losses.detach()
        if (step + 1) % between == 0:
            curve.append((recent / between).tolist())
            recent.zero_()
            report_progress(job, step + 1, steps, curve[-1], began)
            left = (time.time() - began) / (step + 1) * (steps - step - 1)
            if step > steps // 10 and time.time() + left > deadline:
                raise TimeoutError(f"{job.attention} would end after the deadline")
    return stack, [list(x) for x in zip(*curve, strict=True)]


def schedule_rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: it rises over 5 % of the steps, then is a cosine."""
    warmup = max(steps // 20, 1)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))


def compute_losses(stack: Stack, batch: Batch, engine: Any = None) -> Tensor:
    """Return the mean cross-entropy of each run."""
    logits, _ = stack(batch.tokens, engine=engine)
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 2), batch.targets.flatten(), ignore_index=NO_TARGET, reduction="none"
    )
    per_run = losses.view(len(batch.tokens), -1).sum(1)
    return per_run / (batch.targets >= 0).flatten(1).sum(1)


def report_progress(job: Job, step: int, steps: int, losses: list[float], began: float) -> None:
    means: dict[str, list[float]] = {}
    for (task, _), loss in zip(job.runs, losses, strict=True):
        means.setdefault(task, []).append(loss)
    words = " ".join(f"{task} {sum(x) / len(x):.2f}" for task, x in means.items())
    speed = (time.time() - began) / step * 1000
    print(f"{job.attention} {step}/{steps} {speed:.1f} ms: {words}", file=sys.stderr, flush=True)


@torch.no_grad()
def test_stack(stack: Stack, job: Job, settings: Settings, factor: int) -> dict[str, list[Any]]:
    """Return, for each run at a length: accuracy, whole sequences right, weight on the answer."""
    length = settings.length * factor
    count = max(settings.test_tokens // length, 1)
    per_call = max(min(count, MAX_TOKENS_PER_CALL // length), 1)
    source = BatchSource(job, settings.device, TEST_SEED)
    right = scored = exact = torch.zeros(len(job.runs), device=settings.device)
    sequences, weight_on_answer = 0, None
    while sequences < count:
        batch = source.draw(per_call, length)
        is_first = sequences == 0
        logits, probes = stack(batch.tokens, min(PROBED_QUERIES, length // 2) * is_first)
        is_right = (logits.argmax(-1) == batch.targets) & batch.is_scored
        right = right + is_right.sum((1, 2))
        scored = scored + batch.is_scored.sum((1, 2))
        exact = exact + (is_right == batch.is_scored).all(2).sum(1)
        sequences += per_call
        if is_first:
            weight_on_answer = measure_answer_weight(probes, batch.answer_rows)
    return {
        "accuracy": (right / scored).tolist(),
        "exact": (exact / sequences).tolist(),
        "answer_weight": weight_on_answer or [],
    }


def measure_answer_weight(probes: list[Tensor], answer_rows: Tensor) -> list[float | None]:
    """Return the share of weight on the row with the answer, in the best head of each run.

    None for tasks whose answer is in no single row.
    """
    probed = probes[0].shape[-2]
    rows = answer_rows[:, :, -probed:]
    counts = rows != NO_TARGET
    best = torch.zeros(len(rows), device=rows.device)
    for weights in probes:
        total = weights.sum(-1).clamp_min(1.0)  # a sink leaves less than 1, which counts
        at = rows.clamp_min(0)[:, :, None, :, None].expand(*weights.shape[:-1], 1)
        share = weights.gather(-1, at)[..., 0] / total * counts[:, :, None]
        mean = share.sum((1, 3)) / counts.sum((1, 2))[:, None].clamp_min(1)
        best = torch.maximum(best, mean.max(1).values)
    has_rows = counts.flatten(1).any(1).tolist()
    return [float(x) if has else None for x, has in zip(best, has_rows, strict=True)]


def run_job(job: Job, settings: Settings, deadline: float) -> list[dict[str, Any]]:
    """Train and test the runs of a job, and return the line of each cell."""
    began = time.time()
    stack, curves = train_stack(job, settings, deadline)
    trained = time.time()
    tests: dict[str, dict[str, list[Any]]] = {}
    failures = []
    for factor in settings.factors:
        if time.time() > deadline:
            failures.append(f"{factor} L: no time left")
            continue
        try:
            measured = test_stack(stack, job, settings, factor)
        except (RuntimeError, NotImplementedError) as error:
            failures.append(f"{factor} L: {type(error).__name__}: {error}"[:500])
            continue
        for name, numbers in measured.items():
            tests.setdefault(name, {})[str(settings.length * factor)] = numbers
    lines = []
    for index, (task, seed) in enumerate(job.runs):
        line: dict[str, Any] = {"task": task, "attention": job.attention, "seed": seed}
        line |= {
            name: {length: numbers[index] for length, numbers in by_length.items()}
            for name, by_length in tests.items()
        }
        line |= {
            "curve": [round(loss, 4) for loss in curves[index]],
            "layers": job.layers,
            "heads": HEADS,
            "width": WIDTH,
            "parameters": stack.parameter_count,
            "learned": read_learned(stack, index),
            "settings": {k: v for k, v in asdict(settings).items() if k != "factors"},
            "stack": len(job.runs),
            "seconds_of_training": round(trained - began, 1),
            "seconds_of_tests": round(time.time() - trained, 1),
            "torch": torch.__version__,
        }
        if failures:
            line["failures"] = failures
        lines.append(line)
    return lines


def read_learned(stack: Stack, run: int) -> list[list[float]] | None:
    """Return the numbers that the heads of a run learned (alpha, sink, …), layer by layer."""
    if not stack.kind.learns:
        return None
    sizes = [math.prod(shape) for shape in stack.shapes.values()]
    parts = stack.numbers[run].detach().split(sizes)
    named = zip(stack.shapes, parts, strict=True)
    return [[round(x, 4) for x in part.tolist()] for name, part in named if "learned" in name]


def run_job_in_process(arguments: tuple[Job, Settings, float]) -> tuple[Job, list[dict], str]:
    """Run a job in a worker process; return its lines, or why there are none."""
    job, settings, deadline = arguments
    torch.set_float32_matmul_precision("high")
    if settings.device == "cuda":
        torch.set_num_threads(1)
    try:
        return job, run_job(job, settings, deadline), ""
    except TimeoutError as error:
        return job, [], str(error)
    except Exception:
        return job, [], traceback.format_exc()[-1500:]
    finally:
        if settings.device == "cuda":
            torch.cuda.empty_cache()


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results, without one that was cut off."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"skipped an incomplete line of {path}", file=sys.stderr)
    return lines


def run_jobs(jobs: list[Job], settings: Settings, path: Path, workers: int, seconds: float) -> None:
    """Run jobs in worker processes for a time, and append the results as they come."""
    deadline = time.time() + seconds
    path.parent.mkdir(parents=True, exist_ok=True)
    tasks = [(job, settings, deadline) for job in jobs]
    if workers == 1:
        for task in tasks:
            write_results(path, *run_job_in_process(task))
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        results = pool.imap_unordered(run_job_in_process, tasks)
        for _ in tasks:
            try:
                write_results(path, *results.next(max(deadline + 20 - time.time(), 1)))
            except multiprocessing.TimeoutError:
                print("stopped at the deadline", file=sys.stderr)
                break
        pool.terminate()


def write_results(path: Path, job: Job, lines: list[dict[str, Any]], reason: str) -> None:
    name = f"{job.attention} ({job.layers} layers, {len(job.runs)} runs)"
    if reason:
        print(f"{name}: no result: {reason}", file=sys.stderr, flush=True)
        return
    with path.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    seconds = lines[0]["seconds_of_training"], lines[0]["seconds_of_tests"]
    print(f"{name}: trained in {seconds[0]} s, tested in {seconds[1]} s", flush=True)
    for failure in lines[0].get("failures", ()):
        print(f"    {failure}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/examples/recall"), metavar="DIR")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--attentions", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--batch", type=int, default=Settings.batch)
    parser.add_argument("--length", type=int, default=Settings.length)
    parser.add_argument("--rate", type=float, default=Settings.rate)
    parser.add_argument("--factors", nargs="+", type=int, default=Settings.factors)
    parser.add_argument("--test-tokens", type=int, default=Settings.test_tokens, metavar="N")
    parser.add_argument("--engine", help='of the training: a name, or "fastest"')
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    options = parser.parse_args()
    settings = Settings(
        steps=options.steps,
        batch=options.batch,
        length=options.length,
        rate=options.rate,
        factors=tuple(options.factors),
        test_tokens=options.test_tokens,
        engine=options.engine,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    path = options.out / "results.jsonl"
    finished = {(x["task"], x["attention"], x["seed"]) for x in read_results(path)}
    jobs = list_jobs(options.tasks, options.attentions, options.seeds, finished)
    run_jobs(jobs, settings, path, options.jobs, options.seconds)


if __name__ == "__main__":
    main()
