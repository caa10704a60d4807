"""The tasks ask for what is in their tables, runs of a stack are independent, and a cell trains."""

import json
import math
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from examples.recall import models, tasks, train  # noqa: E402
from examples.recall.models import ATTENTIONS, Stack  # noqa: E402

pytestmark = pytest.mark.sample_of_module(5)

RECALLS = [name for name in tasks.TASKS if name != "sort"]


def draw_batch(task: str, length: int = 64, count: int = 4) -> tasks.Batch:
    return tasks.TASKS[task](count, length, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("length", [16, 64, 256])
@pytest.mark.parametrize("task", tasks.TASKS)
def test_shapes(task: str, length: int) -> None:
    batch = draw_batch(task, length)
    assert batch.tokens.shape == (4, length)
    assert all(x.shape == (4, length // 2) for x in batch[1:])
    assert int(batch.tokens.min()) >= 0 and int(batch.tokens.max()) < tasks.VOCABULARY
    assert int(batch.targets.max()) < tasks.SEPARATOR
    assert bool((batch.targets[batch.is_scored] >= 0).all())
    assert bool(batch.is_scored.any(1).all())


@pytest.mark.parametrize("task", RECALLS)
def test_the_answer_is_in_its_row(task: str) -> None:
    batch = draw_batch(task)
    rows = batch.answer_rows
    asked = rows != tasks.NO_TARGET
    assert torch.equal(asked, batch.targets != tasks.NO_TARGET)
    # In reverse order, the row of a symbol knows the symbol before it.
    at = rows.clamp_min(0) - int(task == "reverse")
    answer = batch.tokens.gather(1, at)
    assert torch.equal(answer[asked], batch.targets[asked])
    position = torch.arange(32, 64).expand_as(rows)
    assert bool((rows[asked] <= position[asked]).all())


def test_recall_answers_its_key() -> None:
    tokens, targets, _, rows = draw_batch("mqar")
    key = tokens.gather(1, rows - 1)
    assert torch.equal(key, tokens[:, 32:])
    assert all(len(set(row[:32:2].tolist())) == 16 for row in tokens)
    assert bool((targets >= tasks.SYMBOLS).all())


@pytest.mark.parametrize("length", [24, 64])
def test_two_hops_are_two_look_ups(length: int) -> None:
    batch = draw_batch("hops", length)
    half = length // 2
    for row, wanted in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        start = half % 3
        rows = [row[at : at + 3] for at in range(start, half, 3)]
        assert all(first == tasks.SEPARATOR for first, _, _ in rows)
        table = {key: value for _, key, value in rows}
        for key, value, second in zip(row[half::2], wanted[::2], wanted[1::2], strict=True):
            assert (value, second) == (table[key], table[table[key]])
    assert bool((batch.is_scored == (torch.arange(half) % 2 == 1)).all())


def test_a_convolution_reads_the_rows_before() -> None:
    x, taps = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 6)
    projection = torch.randn(2, 4, 6)
    rows = (x.flatten(1, 2) @ projection).view(2, 3, 5, 6)
    wanted = taps[:, None, None, 0] * rows
    for j in (1, 2):
        wanted[:, :, j:] += taps[:, None, None, j] * rows[:, :, :-j]
    joined = models.join_earlier_rows(x, 3)
    weights = (projection[:, None] * taps[:, :, None]).flatten(1, 2)
    torch.testing.assert_close((joined @ weights).view_as(wanted), wanted)


@pytest.mark.parametrize("name", ["softmax/rotary", "softmax/half-rotary"])
def test_rotary_scores_depend_on_the_distance(name: str) -> None:
    """Earlier keys of weight 0 move all positions, and change nothing."""
    query, key = torch.randn(2, 1, models.HEADS, 6, 16, dtype=torch.float64)
    far = torch.cat([torch.full_like(key[..., :1, :], 0.0), key], -2)
    kind, slopes = ATTENTIONS[name], torch.zeros(models.HEADS)
    near = models.attend_heads(kind, query, key, None, None, slopes)
    moved = models.attend_heads(kind, query, far, None, None, slopes)[..., 1:]
    torch.testing.assert_close(moved / moved.sum(-1, keepdim=True), near)


def test_noisy_and_similar_keys() -> None:
    for task, equal in (("noisy", 2), ("similar", 3)):
        tokens, targets, _, rows = draw_batch(task)
        for row, wanted, at in zip(tokens, targets, rows, strict=True):
            for place in (wanted >= 0).nonzero()[:, 0].tolist():
                end = int(at[place])
                key, query = row[end - 3 : end], row[32 + place - 2 : 32 + place + 1]
                assert int((key == query).sum()) == equal
    keys = draw_batch("similar").tokens[:, :32].view(4, 8, 4)[..., :3]
    nearest = (keys[:, :, None] == keys[:, None]).sum(-1) - 3 * torch.eye(8, dtype=torch.int64)
    assert bool((nearest.max(-1).values >= 2).all())


def test_sorting_counts_ends_of_runs() -> None:
    tokens, targets, is_scored, _ = draw_batch("sort")
    assert torch.equal(targets, tokens[:, :32].sort(-1).values)
    repeated = torch.cat([tokens[:, 32:33], targets[:, :-1]], 1)
    starts = (targets != repeated) & is_scored
    repeats = (targets == repeated) & is_scored
    assert torch.equal(starts, targets != repeated)
    assert int(repeats.sum()) <= int(starts.sum())


def test_batches_repeat_and_runs_differ() -> None:
    job = train.Job("softmax", 2, (("mqar", 0), ("mqar", 1), ("copy", 0)))
    one, two = (train.BatchSource(job, "cpu").draw(2, 32).tokens for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one[0], one[1])
    alone = train.Job("softmax", 2, (("mqar", 1),))
    assert torch.equal(train.BatchSource(alone, "cpu").draw(2, 32).tokens[0], one[1])


@pytest.mark.parametrize("name", ["softmax", "softmax-sink", "entmax15/rotary"])
def test_a_run_does_not_depend_on_its_stack(name: str) -> None:
    tokens = torch.stack([draw_batch(task, 16, 2).tokens for task in ("mqar", "copy")])
    together, alone = Stack(ATTENTIONS[name], [3, 4]), Stack(ATTENTIONS[name], [4])
    logits = together(tokens)[0]
    torch.testing.assert_close(logits[1:], alone(tokens[1:])[0], atol=1e-5, rtol=1e-4)
    logits[0].sum().backward()
    gradient = together.numbers.grad
    assert gradient is not None
    assert not gradient[1].any() and gradient[0].any()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attentions_are_causal_and_learn(name: str) -> None:
    stack = Stack(ATTENTIONS[name], [0], 1)
    batch = draw_batch("mqar", 16, 2)
    tokens = batch.tokens[None]
    logits, (weights,) = stack(tokens, probed=4)
    assert logits.shape == (1, 2, 8, tasks.VOCABULARY)
    assert weights.shape == (1, 2, models.HEADS, 4, 16)
    assert not weights.triu(13).any()
    changed = tokens.clone()
    changed[..., -1] = (changed[..., -1] + 1) % tasks.SYMBOLS
    torch.testing.assert_close(stack(changed)[0][:, :, :-1], logits[:, :, :-1])
    train.compute_losses(stack, tasks.Batch(*(x[None] for x in batch))).sum().backward()
    gradient = stack.numbers.grad
    assert gradient is not None and bool(gradient.isfinite().all()) and bool(gradient.any())


def test_kinds_are_of_one_size() -> None:
    sizes = {name: Stack(kind, [0]).parameter_count for name, kind in ATTENTIONS.items()}
    least, most = sizes["softmax"], sizes["asentmax"]
    assert all(x in (least, least + 2 * models.HEADS, most) for x in list(sizes.values())[:-3])
    assert most < 1.005 * least


def test_kinds_begin_with_the_same_parameters() -> None:
    first = {}
    for name in ("softmax", "asentmax", "softmax-sink", "softmax/no-convolution"):
        stack = Stack(ATTENTIONS[name], [1])
        sizes = [math.prod(shape) for shape in stack.shapes.values()]
        parts = dict(zip(stack.shapes, stack.numbers[0].split(sizes), strict=True))
        first[name] = torch.cat([parts["embedding"], parts["0.projection"], parts["1.down"]])
    assert all(torch.equal(x, first["softmax"]) for x in first.values())


def test_asentmax_scales_each_query() -> None:
    """1 + softplus(β) (log n)^tanh(γ), with log(1 + keys) for the first query."""
    numbers = torch.tensor([[0.5, -1.0], [2.0, 0.3]])[:, :, None].expand(2, 2, models.HEADS)
    scale = models.scale_queries(numbers[None])[0, 0, :, 0]
    wanted = []
    for keys, (beta, gamma) in zip((1, 2), numbers[..., 0].tolist(), strict=True):
        wanted.append(1 + math.log1p(math.exp(beta)) * math.log1p(keys) ** math.tanh(gamma))
    assert scale.tolist() == pytest.approx(wanted)


def test_jobs_leave_out_finished_cells() -> None:
    jobs = train.list_jobs(["mqar", "hops"], ["softmax", "hard"], [0, 1], {("mqar", "hard", 0)})
    assert jobs == [
        train.Job("softmax", 2, (("mqar", 0), ("mqar", 1))),
        train.Job("hard", 2, (("mqar", 1),)),  # the next group of tasks comes later
        train.Job("softmax", 3, (("hops", 0), ("hops", 1))),
        train.Job("hard", 3, (("hops", 0), ("hops", 1))),
    ]


def test_each_task_is_in_one_group() -> None:
    jobs = train.list_jobs(tasks.TASKS, ["softmax"], [0], set())
    assert sorted(task for job in jobs for task, _ in job.runs) == sorted(tasks.TASKS)
    assert all(tasks.LAYERS[task] == job.layers for job in jobs for task, _ in job.runs)


def test_a_cell_is_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "train --tasks mqar --attentions softmax --seeds 0 --steps 24 --batch 4 --length 16"
    command += f" --factors 1 2 --test-tokens 64 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", command.split())
    train.main()
    train.main()
    (line,) = (tmp_path / "results.jsonl").read_text().splitlines()
    cell = json.loads(line)
    assert (cell["task"], cell["attention"], cell["seed"]) == ("mqar", "softmax", 0)
    assert set(cell["accuracy"]) == set(cell["answer_weight"]) == {"16", "32"}
    assert cell["curve"][-1] < cell["curve"][0]
    assert capsys.readouterr().out.count("trained in") == 1


def test_worker_processes_need_no_time_limit(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    settings = train.Settings(steps=1, batch=2, length=16, factors=(1,), test_tokens=32)
    jobs = [train.Job(name, 2, (("mqar", 0),)) for name in ("softmax", "hard")]
    train.run_jobs(jobs, settings, path, 2, math.inf)
    assert {x["attention"] for x in train.read_results(path)} == {"softmax", "hard"}


def test_a_training_that_is_too_long_leaves_no_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    settings = train.Settings(steps=40, batch=2, length=16)
    train.run_jobs([train.Job("softmax", 2, (("mqar", 0),))], settings, path, 1, -1.0)
    assert not path.exists()
    assert "deadline" in capsys.readouterr().err


def test_an_incomplete_line_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"task": "mqar"}\n{"task": "co')
    assert train.read_results(path) == [{"task": "mqar"}]
    assert "incomplete" in capsys.readouterr().err
