"""How long does the page need to show all heads of a model, and to redraw a large matrix?

In Chromium, from one HTML file: 12 × 12 heads of 512 × 512 weights until the visible ones are
drawn, and one head of 2,048 × 2,048 panned and zoomed.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import numpy as np

from bench._side_by_side import save_results, size
from qkv.page import to_html
from qkv.page.heads import heads_view

# A frame at sixty a second, in ms.
FRAME = 1e3 / 60
# What was drawn is read back: else the time is that of an order, not of the drawing.
ZOOMED = """(canvas) => {
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const times = [];
  return new Promise((done) => {
    const step = (i) => {
      const start = performance.now();
      const key = i < 10 ? "+" : "ArrowDown";
      canvas.dispatchEvent(new KeyboardEvent("keydown", { key, shiftKey: i >= 10 }));
      requestAnimationFrame(() => {
        pen.getImageData(0, 0, 1, 1);
        times.push(performance.now() - start);
        i < 60 ? setTimeout(step, 0, i + 1) : done(times.sort((a, b) => a - b));
      });
    };
    step(0);
  });
}"""
DRAWN = """() => {
  const root = document.querySelector("main > div")?.shadowRoot;
  const box = root?.querySelector(".scroll")?.getBoundingClientRect();
  const seen = [...(root?.querySelectorAll(".heads canvas") ?? [])].filter((x) => {
    const { bottom, right } = x.getBoundingClientRect();
    return bottom < innerHeight && right < box.right;
  });
  // A canvas is 300 wide until it is drawn.
  return seen.length > 0 && seen.every((x) => x.width !== 300);
}"""


def weights(layers: int, count: int, n: int) -> np.ndarray:
    """Return heads that attend near and far, like those of a model."""
    rng = np.random.default_rng(14)
    apart = abs(np.arange(n)[:, None] - np.arange(n)).astype(np.float32)
    reach = rng.uniform(4, n, (layers, count, 1, 1)).astype(np.float32)
    scores = 2 * rng.standard_normal((layers, count, n, n), np.float32) - apart / reach
    alpha = np.exp(scores - scores.max(-1, keepdims=True))
    found: np.ndarray = alpha / alpha.sum(-1, keepdims=True)
    return found


def measured(work, ms, goal, most, **more):
    found = {"goal": goal, "found": ms, "met": ms <= most}
    return {"work": work, "sides": {"qkv": {"ms": ms, **more}}, "goals": [found]}


def rows():
    from playwright.sync_api import sync_playwright

    from tests.browser import FLAGS, chromium

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=FLAGS)
        n = size(512, 64)
        many = Path(folder) / "many.html"
        to_html(heads_view(weights(12, 12, n), [f"layer {i}" for i in range(12)]), many)
        times = []
        for _ in range(5):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(many.as_uri(), wait_until="commit")
            page.wait_for_function(DRAWN, timeout=60_000)
            times.append(page.evaluate("performance.now()"))
            page.close()
        mib = many.stat().st_size / 2**20
        work = f"page: 12 × 12 heads × {n}², a file of {mib:.0f} MiB, until drawn"
        yield measured(work, statistics.median(times), "≤ 2 s", 2000)

        n = size(2048, 256)
        large = Path(folder) / "large.html"
        to_html(heads_view(weights(1, 1, n), ["layer 0"]), large)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(large.as_uri())
        canvas = page.get_by_test_id("head").element_handle()
        page.wait_for_function("(canvas) => canvas.width > 300", arg=canvas)
        frames = canvas.evaluate(ZOOMED)
        for name, at in (("half of the frames", 30), ("all but three frames", 57)):
            work = f"page: {n}², pan or zoom by key, {name}"
            yield measured(work, frames[at], "≤ two frames of 60 a second", 2 * FRAME)
        browser.close()


if __name__ == "__main__":
    save_results("page", rows())
