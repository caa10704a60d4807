"""Check that the tests fail where they should: 60 hand-written bugs, each with its nearest tests.

    python -m tools.mutants                   run all of them
    python -m tools.mutants NAME ...          run these
    python -m tools.mutants --formulas        run the generated mutants of scores and weightings

For each mutant the tool copies `src` to a temporary folder, replaces one snippet of code, and runs
the tests of the mutant with PYTHONPATH set to the copy. A mutant is killed if a test fails, and
survives if all pass. The exit status is 1 if any survives or cannot be run.

Before the mutants, the tool runs their tests once on the unchanged source: a test that fails there
kills nothing. `--no-baseline` leaves that out.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 400
"""Seconds after which a mutant that does not end counts as killed."""


class Mutant(NamedTuple):
    """One bug: `snippet`, which occurs once in `file` (under src/qkv), becomes `replacement`."""

    name: str
    file: str
    snippet: str
    replacement: str
    tests: str
    """Arguments of pytest: the smallest set of tests that should fail."""


STORAGE, SERVE = "tests/database/storage/", "tests/serve/"
ENGINES, TRITON = "tests/engines/", "tests/engines/triton/"

STORAGE_MUTANTS = [
    Mutant(
        "commit-skips-an-id",
        "database/storage/store.py",
        "last=ids.stop - 1,",
        "last=ids.stop,",
        STORAGE + "test_store.py::test_one_commit_removes_and_adds",
    ),
    Mutant(
        "segment-not-synced",
        "database/storage/blob_storage.py",
        "self.fsync(file.fileno(), path)",
        "pass",
        STORAGE + "test_crash.py::test_power_cuts",
    ),
    Mutant(
        "folder-not-synced-before-commit",
        "database/storage/writer.py",
        "self._blob_storage.sync_storage()",
        "pass",
        STORAGE + "test_crash.py::test_power_cuts",
    ),
    Mutant(
        "catalog-commit-not-synced",
        "database/storage/catalog.py",
        "PRAGMA synchronous = FULL",
        "PRAGMA synchronous = NORMAL",
        STORAGE + "test_catalog.py",
    ),
    Mutant(
        "row-deleted-twice",
        "database/storage/writer.py",
        "WHERE id = ? AND died IS NULL",
        "WHERE id = ?",
        STORAGE + "test_store.py::test_bad_input_changes_nothing",
    ),
    Mutant(
        "marker-checksum-ignored",
        "database/storage/commit_marker.py",
        'if version is None or crc32(b"%b %b" % (version, files)) != int(crc, 16):',
        "if version is None:",
        STORAGE + "test_commit_marker.py",
    ),
    Mutant(
        "older-catalog-accepted",
        "database/storage/garbage.py",
        "newest < marker.version",
        "newest > marker.version",
        STORAGE + "test_commit_marker.py",
    ),
    Mutant(
        "first-leftover-file-kept",
        "database/storage/garbage.py",
        "<= next_number <= number",
        "<= next_number < number",
        STORAGE + "test_store.py::test_leftovers_are_removed_by_the_next_writer",
    ),
    Mutant(
        "write-lock-shared",
        "database/storage/lock.py",
        "locks.flock(file, locks.LOCK_EX | locks.LOCK_NB)",
        "locks.flock(file, locks.LOCK_SH | locks.LOCK_NB)",
        STORAGE + "test_store.py::test_one_writer",
    ),
    Mutant(
        "read-version-claimed",
        "database/storage/lock.py",
        "kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK",
        "kind = fcntl.F_RDLCK",
        STORAGE + "test_store.py::test_compaction_keeps_what_another_process_reads",
    ),
    Mutant(
        "compaction-keeps-the-last-dead-row",
        "database/storage/compaction.py",
        "(ids[0], ids[-1] + 1)",
        "(ids[0], ids[-1])",
        STORAGE + "test_store.py -k compaction",
    ),
    Mutant(
        "compaction-copies-damage",
        "database/storage/blob_storage.py",
        "blob_storage.verify_file(entry.file, entry.size, entry.checksum)",
        "blob_storage.list_files()",
        STORAGE + "test_store.py::test_a_flipped_bit_is_found_by_check_and_not_copied",
    ),
    Mutant(
        "repair-reuses-an-acknowledged-version",
        "database/storage/integrity_check.py",
        "version = max(version, marker.version + 1)",
        "version = max(version, marker.version)",
        STORAGE + "test_commit_marker.py -k repair",
    ),
]

QUERY_MUTANTS = [
    Mutant(
        "filter-number-equals-missing",
        "database/filter/comparisons.py",
        "is_equal &= (column.kinds != MISSING) & (column.kinds != TEXT) & (column.kinds != OTHER)",
        "is_equal &= (column.kinds != TEXT) & (column.kinds != OTHER)",
        "tests/database/filter/test_filter.py -k missing_number",
    ),
    Mutant(
        "filter-not-mirrored",
        "database/filter/comparisons.py",
        "return order_condition(_MIRRORED_OPERATORS[type(op)](), right, left)",
        "return order_condition(op, right, left)",
        "tests/database/filter/test_filter.py",
    ),
    Mutant(
        "text-cache-without-the-first-id",
        "database/table/column_chunk.py",
        "(name, int(self.ids[0]) if len(self) else -1, len(self))",
        "(name, -1, len(self))",
        "tests/database/filter/test_filter.py -k pieces",
    ),
    Mutant(
        "negative-weights-ranked-last",
        "database/query/scan.py",
        "if self.weighting.is_convex else np.abs(",
        "if True else np.abs(",
        "tests/database/query/test_scan.py",
    ),
    Mutant(
        "tied-runs-of-rows-left-out",
        "database/query/scan.py",
        "size[order] >= _kth_largest(size[order], top)",
        "size[order] > _kth_largest(size[order], top)",
        "tests/database/query/test_scan.py",
    ),
    Mutant(
        "calibration-quantile-one-short",
        "database/query/calibration.py",
        "k = int(share * (len(x) + 1) + ROUNDING_TOLERANCE)",
        "k = int(share * len(x) + ROUNDING_TOLERANCE)",
        "tests/database/query/test_calibration.py",
    ),
    Mutant(
        "calibration-outlives-all-changes",
        "database/query/calibration.py",
        "MAX_CHANGED_SHARE = 0.1",
        "MAX_CHANGED_SHARE = 1.0",
        "tests/database/query/test_calibration.py",
    ),
    Mutant(
        "shown-weight-ten-times-larger",
        "answer.py",
        "MIN_SHOWN_WEIGHT = 0.0005",
        "MIN_SHOWN_WEIGHT = 0.005",
        "tests/test_answer.py -k rows_that_three_digits",
    ),
    Mutant(
        "negative-zero-is-another-key",
        "database/table/cells.py",
        "(key + _POSITIVE_ZERO).data",
        "key.data",
        "tests/database/table/test_cells.py",
    ),
    Mutant(
        "smallest-scale-ten-times-larger",
        "database/table/quantization.py",
        "MIN_SCALE = 1e-37",
        "MIN_SCALE = 1e-36",
        "tests/database/table/test_quantization.py -k number",
    ),
    Mutant(
        "scott-without-the-width",
        "database/encoders/numbers.py",
        "(-1 / (self.width + 4))",
        "(-1 / 5)",
        "tests/database/encoders/test_numbers.py",
    ),
    Mutant(
        "local-time-taken-for-utc",
        "database/encoders/numbers.py",
        "datetime.datetime(1, 1, 1) - offset",
        "datetime.datetime(1, 1, 1) + offset",
        "tests/database/encoders/test_numbers.py",
    ),
    Mutant(
        "ngrams-without-a-sign",
        "database/encoders/characters.py",
        "np.where(code & np.uint32(1), weight, -weight)",
        "np.where(code & np.uint32(1), weight, weight)",
        "tests/database/encoders/test_characters.py",
    ),
]

SERVER_MUTANTS = [
    Mutant(
        "batch-waits-for-nobody",
        "serve/batch.py",
        "WAIT_FRACTION, MAX_WAIT_SECONDS = 1 / 4, 0.05",
        "WAIT_FRACTION, MAX_WAIT_SECONDS = 0.0, 0.0",
        SERVE + "test_batch.py",
    ),
    Mutant(
        "batch-ten-times-larger",
        "serve/batch.py",
        "count > limits.MAX_QUERIES or",
        "count > 10 * limits.MAX_QUERIES or",
        SERVE + "test_batch.py",
    ),
    Mutant(
        "batch-ends-with-its-first-deadline",
        "serve/batch.py",
        "max(deadlines) if",
        "min(deadlines) if",
        SERVE + "test_limits.py -k deadline",
    ),
    Mutant(
        "read-token-writes",
        "serve/security.py",
        ' and right == "read")',
        ")",
        SERVE + "test_security.py",
    ),
    Mutant(
        "no-token-is-a-token",
        "serve/security.py",
        " and bool(expected)",
        "",
        SERVE + "test_security.py",
    ),
    Mutant(
        "other-origins-served",
        "serve/security.py",
        "if origin is not None and origin !=",
        "if origin is None and origin !=",
        SERVE + "test_security.py",
    ),
    Mutant(
        "body-bytes-never-given-back",
        "serve/app.py",
        'self.served.held_body_bytes -= scope.get("qkv.held", 0)',
        "pass",
        SERVE + "test_app.py -k bodies",
    ),
    Mutant(
        "work-goes-on-after-the-timeout",
        "serve/app.py",
        "with limit_time(time.monotonic() + limits.REQUEST_TIMEOUT_SECONDS):",
        "with limit_time(None):",
        SERVE
        + "test_app.py::test_what_takes_too_long "
        + SERVE
        + "test_limits.py -k 'long or dead'",
    ),
    Mutant(
        "boolean-is-an-integer",
        "serve/validation.py",
        'return kind == "boolean"',
        'return kind in ("boolean", "integer")',
        SERVE + "test_validation.py",
    ),
    Mutant(
        "ten-times-more-uploads",
        "serve/databases.py",
        ">= limits.MAX_UPLOADS:",
        ">= 10 * limits.MAX_UPLOADS:",
        SERVE + "test_api.py -k upload",
    ),
]

PLAN_MUTANTS = [
    Mutant(
        "plan-cache-never-evicts",
        "util/caches.py",
        "if len(table) >= max_entries:",
        "if False:",
        ENGINES + "test_plan_cache.py::test_the_plan_cache_evicts_when_it_is_full",
    ),
    Mutant(
        "plan-key-without-the-registry",
        "engines/plan_cache.py",
        "mask, flags, REGISTRY_VERSION[0]",
        "mask, flags, 0",
        ENGINES + "test_plan_cache.py::test_a_name_that_is_registered_again",
    ),
    Mutant(
        "plan-key-without-the-widths",
        "engines/plan_cache.py",
        "return leads, widths, n.bit_length()",
        "return leads, n.bit_length()",
        ENGINES + "test_plan_cache.py::test_a_plan_serves_lengths_of_one_size_and_no_other_width",
    ),
    Mutant(
        "plan-for-numbers-out-of-range",
        "engines/plan_cache.py",
        "if call.exceeds_float32 or call.may_exceed_float64:",
        "if False:",
        "tests/test_attention.py::test_numbers_that_float32_does_not_hold",
    ),
    Mutant(
        "slower-engine-chosen",
        "engines/choice.py",
        " or engine.slower_reason(call)",
        "",
        "tests/util/test_logging.py",
    ),
    Mutant(
        "masked-rows-not-zeroed",
        "engines/call.py",
        "return fw.fill_unless(rows, is_visible)",
        "return rows",
        ENGINES + "test_plan_cache.py -k masked",
    ),
    Mutant(
        "any-number-of-heads-shared",
        "engines/validation.py",
        "elif heads and y and x % y == 0:",
        "elif heads and y:",
        "tests/test_errors.py -k 'heads and divide'",
    ),
    Mutant(
        "lse-gradient-sign",
        "engines/streaming.py",
        "centre = centre - fw.slice_span(gradients[1], rows, -2)",
        "centre = centre + fw.slice_span(gradients[1], rows, -2)",
        ENGINES + "test_derivatives.py::test_the_log_sum_exp_has_gradients",
    ),
    Mutant(
        "tiling-key-without-the-keys",
        "engines/streaming.py",
        "(fw.name, rule, n, m, rows, cols)",
        "(fw.name, rule, n, rows, cols)",
        ENGINES + "test_streaming.py -k tiling",
    ),
    Mutant(
        "dropout-without-its-scale",
        "engines/dropout.py",
        "(1 / (1 - p) if p < 1 else 0.0)",
        "(1.0 if p < 1 else 0.0)",
        "tests/test_properties.py::test_dropout_is_fair",
    ),
    Mutant(
        "score-interval-half-as-wide",
        "engines/out_of_core/score_intervals.py",
        "errors + errors[largest]",
        "errors",
        ENGINES + "out_of_core/test_score_intervals.py",
    ),
    Mutant(
        "block-bound-without-its-remainder",
        "engines/out_of_core/block_sums.py",
        "gain = loss + (1 + rounding_error) ** 2",
        "gain = loss + 0 * (1 + rounding_error) ** 2",
        ENGINES + "out_of_core/test_block_sums.py",
    ),
    Mutant(
        "pruned-gradient-sign",
        "engines/gaussian_pruning/boxes.py",
        "slope @ key - slope.sum(axis=1)",
        "slope @ key + slope.sum(axis=1)",
        ENGINES + "test_gaussian_pruning.py -k gradients",
    ),
    Mutant(
        "ring-in-the-other-direction",
        "engines/sharded.py",
        "(rank - step) % len(rows)",
        "(rank + step) % len(rows)",
        ENGINES + "test_sharded.py::test_what_several_hold_is_attended_to_as_one",
    ),
]

TRITON_MUTANTS = [
    Mutant(
        "split-totals-not-rescaled",
        "engines/triton/forward/forward.py",
        "some = some * scale",
        "some = some",
        TRITON + "test_attend_operator.py::test_split_over_keys",
    ),
    Mutant(
        "backward-without-the-mask",
        "engines/triton/tile_functions/score_tile.py",
        "ds = tl.where(live, ds, 0.0)",
        "ds = ds",
        TRITON + "test_attend_operator.py::test_what_is_masked_stays_out",
    ),
    Mutant(
        "backward-dropout-missing",
        "engines/triton/backward/backward_keys.py",
        "dp = dp * keep",
        "dp = dp",
        TRITON + "test_mask_arrays.py::test_values_and_gradients -k dropout",
    ),
    Mutant(
        "tied-scores-one-short",
        "engines/triton/sparse/threshold_search.py",
        "fit = tl.where(ones <= max_ties, fit + step, fit)",
        "fit = tl.where(ones < max_ties, fit + step, fit)",
        TRITON + "test_threshold_search.py::test_ties_go_to_the_lowest_positions",
    ),
    Mutant(
        "bands-joined-instead-of-intersected",
        "engines/triton/call_arrays.py",
        "max(lower, default=None)",
        "min(lower, default=None)",
        TRITON + "test_call_arrays.py",
    ),
    Mutant(
        "second-lengths-ignored",
        "engines/triton/call_arrays.py",
        "lengths[0].minimum(lengths[-1])",
        "lengths[0]",
        TRITON + "test_call_arrays.py",
    ),
    Mutant(
        "dropout-same-for-all-heads",
        "engines/triton/tile_functions/tiles.py",
        "x ^ tl.cast(lane % hashed, tl.uint32)",
        "x ^ tl.cast(0 * lane, tl.uint32)",
        TRITON + "test_mask_arrays.py::test_values_and_gradients -k dropout",
    ),
    Mutant(
        "replay-key-without-strides",
        "engines/triton/launching/launch_replay.py",
        "(x.shape, x.stride(), x.dtype, x.get_device())",
        "(x.shape, x.dtype, x.get_device())",
        TRITON + "test_launch_replay.py::test_arrays_of_other_strides_have_launches_of_their_own",
    ),
    Mutant(
        "workspace-overlaps",
        "engines/triton/launching/workspace.py",
        "begin + -(-size // 128) * 128",
        "begin",
        TRITON + "test_launch_replay.py -k 'workspace or pieces'",
    ),
    Mutant(
        "parts-ten-times-longer",
        "engines/triton/launching/launch.py",
        "MIN_ROWS_PER_PART = 512",
        "MIN_ROWS_PER_PART = 5120",
        TRITON + "test_launch.py",
    ),
]

MUTANTS = [*STORAGE_MUTANTS, *QUERY_MUTANTS, *SERVER_MUTANTS, *PLAN_MUTANTS, *TRITON_MUTANTS]


def snippet_count(mutant: Mutant, source: Path = ROOT / "src") -> int:
    """Return how often the snippet occurs in its file."""
    path = source / "qkv" / mutant.file
    return path.read_text().count(mutant.snippet) if path.exists() else 0


def run_tests(tests: str, source: Path) -> tuple[str, str]:
    """Run tests against a source folder; return "passed", "failed" or "broken", and the output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(source)}
    try:
        run = subprocess.run(
            [*command, *shlex.split(tests)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "failed", "the tests did not end"
    verdict = {0: "passed", 1: "failed"}.get(run.returncode, "broken")
    return verdict, run.stdout[-2000:] + run.stderr[-2000:]


def run_mutant(mutant: Mutant) -> str:
    """Return "killed", "SURVIVED", "snippet not found" or "cannot run: …"."""
    if snippet_count(mutant) != 1:
        return "snippet not found"
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source)
        path = source / "qkv" / mutant.file
        path.write_text(path.read_text().replace(mutant.snippet, mutant.replacement))
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()  # its time stamp has whole seconds only
        verdict, output = run_tests(mutant.tests, source)
    if verdict == "broken":
        return f"cannot run: {output}"
    return "killed" if verdict == "failed" else "SURVIVED"


def check_baseline(mutants: list[Mutant]) -> bool:
    """Return whether the tests of the mutants pass on the unchanged source."""
    passed = True
    for tests in dict.fromkeys(mutant.tests for mutant in mutants):
        verdict, output = run_tests(tests, ROOT / "src")
        if verdict != "passed":
            print(f"{tests}: {verdict} on the unchanged source\n{output}", flush=True)
            passed = False
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description="Check that the tests notice hand-written bugs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="mutants to run at a time")
    parser.add_argument("--formulas", action="store_true", help="run the generated mutants instead")
    parser.add_argument("--no-baseline", action="store_true", help="skip the unchanged source")
    options = parser.parse_args()
    if options.formulas:
        verdict, output = run_tests("tests/test_mutants.py", ROOT / "src")
        print(output)
        return int(verdict != "passed")
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := [name for name in options.names if name not in by_name]:
        parser.error(f"unknown mutants {', '.join(unknown)}; there are: {', '.join(by_name)}")
    chosen = [by_name[name] for name in options.names] or MUTANTS
    if not options.no_baseline and not check_baseline(chosen):
        return 1
    killed = 0

    def run_timed(mutant: Mutant) -> tuple[Mutant, str, float]:
        start = time.monotonic()
        return mutant, run_mutant(mutant), time.monotonic() - start

    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, verdict, seconds in pool.map(run_timed, chosen):
            killed += verdict == "killed"
            print(f"{mutant.name:42} {verdict} ({seconds:.0f} s)", flush=True)
    print(f"{killed} of {len(chosen)} mutants killed")
    return int(killed < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
