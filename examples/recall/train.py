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
ENGINES = {"top8": "dense", "additive": "dense"}
"""Engines of the training where the automatic one is slower: short sequences on a GPU."""
CURVE_POINTS = 20


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
    """The engine of the training; None chooses one."""
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


def free_memory(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()


def train_stack(job: Job, settings: Settings, deadline: float) -> tuple[Stack, list[list[float]]]:
    """Return the trained stack, and the losses of each run along the training.

    Raise TimeoutError as soon as the training will not end before the deadline.
    """
    kind, device = ATTENTIONS[job.attention], settings.device
    stack = Stack(kind, [seed for _, seed in job.runs], job.layers).to(device)
    trainer = Trainer(stack, settings, settings.engine or ENGINES.get(job.attention))
    source = BatchSource(job, device)
    lengths = Generator().manual_seed(0)
    steps, curve = settings.steps, []
    recent, began = torch.zeros(len(job.runs), device=device), time.time()
    reported = began
    between = max(steps // CURVE_POINTS, 1)
    for step in range(steps):
        if step % BATCHES_PER_DRAW == 0:
            # Shorter sequences are trained too: a fixed length could be learned by heart.
            eighths = int(torch.randint(2, 9, (), generator=lengths))
            length = max(settings.length * eighths // 64, 1) * 8
            drawn = source.draw(settings.batch * BATCHES_PER_DRAW, length)
            parts = [x.split(settings.batch, 1) for x in drawn]
        batch = Batch(*(part[step % BATCHES_PER_DRAW] for part in parts))
        recent += trainer.train(batch, settings.rate * schedule_rate(step, steps))
        if (step + 1) % between == 0:
            curve.append((recent / between).tolist())
            recent.zero_()
            report_progress(job, step + 1, steps, curve[-1], began)
            # The first steps compile kernels: the last ones tell how long the others take.
            left = (time.time() - reported) / between * (steps - step - 1)
            reported = time.time()
            if step > steps // 3 and reported + left > deadline:
                raise TimeoutError(f"{job.attention} would end after the deadline")
    return stack, [list(x) for x in zip(*curve, strict=True)]


class Trainer:
    """Steps of Adam for a stack. On CUDA each length is recorded once and replayed as a graph.

    Attentions whose calls read values on the host cannot be recorded.
    """

    def __init__(self, stack: Stack, settings: Settings, engine: str | None) -> None:
        self.stack, self.engine = stack, engine
        device = settings.device
        reads_values = engine == "dense" or stack.kind.learns == "alpha"
        reads_values = reads_values or stack.kind.score in ("gaussian", "additive")
        self.records = device == "cuda" and not reads_values
        self.rate = torch.tensor(0.0, device=device)
        self.optimizer = torch.optim.Adam(
            stack.parameters(), self.rate, (0.9, 0.98), fused=True, capturable=self.records
        )
        self.graphs: dict[int, tuple[Any, Batch, Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.records else None

    def train(self, batch: Batch, rate: float) -> Tensor:
        """Train one step, and return the loss of each run."""
        self.rate.fill_(rate)
        length = batch.tokens.shape[-1]
        if self.records and length not in self.graphs:
            self.graphs[length] = self.record(Batch(*(x.clone() for x in batch)))
        if not self.records:
            return self.step(batch)
        graph, inputs, losses = self.graphs[length]
        for old, new in zip(inputs, batch, strict=True):
            old.copy_(new)
        graph.replay()
        return losses

    def record(self, batch: Batch) -> tuple[Any, Batch, Tensor]:
        """Train one step outside of a graph, which compiles kernels, then record a second one."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step(batch)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            losses = self.step(batch)
        return graph, batch, losses

    def step(self, batch: Batch) -> Tensor:
        numbers = self.stack.numbers
        losses = compute_losses(self.stack, batch, self.engine)
        (gradient,) = torch.autograd.grad(losses.sum(), numbers)
        gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
        numbers.grad = gradient / gradient.norm(dim=1, keepdim=True).clamp_min(1.0)
        self.optimizer.step()
        return losses.detach()


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
    free_memory(settings.device)  # other processes need it
    trained = time.time()
    tests: dict[str, dict[str, list[Any]]] = {}
    for factor in settings.factors:
        if time.time() > deadline:
            raise TimeoutError(f"{job.attention}: no time left for the test at {factor} L")
        for name, numbers in test_stack(stack, job, settings, factor).items():
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
            "steps": settings.steps,
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
        free_memory(settings.device)


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results, without one that was cut off."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"skipped an incomplete line of {path}", file=sys.stderr)
    return lines


def limit_memory(share: float) -> None:
    """Let this process take a share of the GPU's memory: then it frees what it keeps in reserve."""
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)


def run_jobs(
    jobs: list[Job],
    settings: Settings,
    path: Path,
    workers: int,
    seconds: float,
    memory_share: float = 1.0,
) -> None:
    """Run jobs in worker processes for a time, and append the results as they come."""
    deadline = time.time() + seconds
    path.parent.mkdir(parents=True, exist_ok=True)
    tasks = [(job, settings, deadline) for job in jobs]
    if workers == 1:
        for task in tasks:
            write_results(path, *run_job_in_process(task))
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, limit_memory, (memory_share,)) as pool:
        results = pool.imap_unordered(run_job_in_process, tasks)
        for _ in tasks:
            try:
                left = None if math.isinf(seconds) else max(deadline + 20 - time.time(), 1)
                write_results(path, *results.next(left))
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
    parser.add_argument("--engine", help="of the training")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    parser.add_argument(
        "--memory-share", type=float, default=1.0, help="of a GPU's memory, for each process"
    )
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
    run_jobs(jobs, settings, path, options.jobs, options.seconds, options.memory_share)


if __name__ == "__main__":
    main()
