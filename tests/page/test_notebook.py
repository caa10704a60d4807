"""The page as a widget: its messages, and itself in JupyterLab."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import qkv
from qkv.errors import MissingExtraError
from qkv.page.calls import run_call
from qkv.page.packing import pack_arrays
from tests.page.jupyter import Lab

MARKUP = "<img src=x onerror=alert(1)>"
ROWS = {"Zhang": "Aston", "Li": "Mu", "Smola": "Alex", MARKUP: "markup"}
FIRST = f"""import numpy as np
import qkv
from qkv.page.heads import heads_view
D = qkv.Database({ROWS!r}, encoder="text")
D.show()"""
SECOND = f"""qkv.page.packing.MIN_DEFERRED_BYTES = 4  # so that weights wait in the kernel
alpha = np.array([[[[0.75, 0.25], [0.0, 1.0]], [[0.5, 0.5], [0.5, 0.5]]]])
qkv.show(heads_view(alpha, ["layer"], labels=["dog", {MARKUP!r}]), "I like {MARKUP}")"""


def test_it_answers_what_it_is_asked() -> None:
    D: Any = qkv.Database(ROWS)
    page = qkv.show(D)
    [view] = page.views
    arguments = {"database": view["data"]["database"], "query": "Lee"}
    reply, _ = page.answer_message({"id": 7, "call": "ask", "args": arguments})
    assert reply == {"id": 7, "result": reply["result"] | D.ask("Lee").to_dict()}
    args = {"keys": list(ROWS), "query": "Li", "encoder": "text"}
    reply, buffers = page.answer_message({"id": 8, "call": "encode", "args": args})
    assert (reply["result"], buffers) == pack_arrays(run_call("encode", args, {}))
    page.all_buffers.append(b"0123456")
    at = {"buffer": len(page.all_buffers) - 1, "start": 2, "stop": 5}
    assert page.answer_message({"id": 0, "call": "part", "args": at})[1] == [b"234"]
    reply, _ = page.answer_message({"id": 9, "call": "fly", "args": {}})
    assert reply["id"] == 9 and "unknown call 'fly'" in reply["error"]
    reply, _ = page.answer_message({"id": 10, "call": "ask", "args": {}})
    assert reply["id"] == 10 and reply["error"]


def test_a_message_that_is_none_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    page: Any = qkv.show(qkv.Database(ROWS))
    sent: list[Any] = []
    monkeypatch.setattr(page, "send", lambda *sent_messages: sent.append(sent_messages))
    for message in ("str", [1], None, {}, {"call": "databases", "args": {}}):
        page._handle_message(page, message, [])
    assert sent == []
    page._handle_message(page, {"id": 1, "call": "fly", "args": {}}, [])
    assert sent[0][0]["id"] == 1


def test_without_anywidget_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "qkv.page.widget", raising=False)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    with pytest.raises(
        MissingExtraError, match=r'^show needs anywidget: pip install "qkv\[widget\]"$'
    ):
        qkv.show("a sentence")


def test_two_widgets_in_jupyterlab(page: Any, lab: Lab) -> None:
    from playwright.sync_api import expect

    lab.run(page, FIRST, SECOND)
    first, second = (page.locator(".jp-CodeCell").nth(i) for i in range(2))
    D: Any = qkv.Database(ROWS, encoder="text")

    def counts(query: str) -> None:
        answer = D.ask(query)
        assert first.get_by_test_id("answer-value").inner_text() == answer.value
        for row in answer.rows:
            shown = float(first.get_by_test_id(f"row-{row.index}-weight").inner_text())
            assert abs(shown - row.weight) < 1e-3

    # The kernel encodes what is typed: the page has no such encoder of its own.
    first.get_by_test_id("answer-value").wait_for()
    counts("zhng")
    first.get_by_test_id("query").press("ControlOrMeta+a")
    page.keyboard.type("bdd Smoler")  # b adds a cell, d d cuts it, where a notebook hears them
    first.get_by_test_id("query").fill("Smoler")
    first.get_by_test_id("note").wait_for(state="hidden")
    counts("Smoler")
    assert first.get_by_test_id("row-3-key").input_value() == MARKUP

    second.get_by_test_id("head-0-1").click()
    expect(second.get_by_test_id("head-high")).to_have_text("0.500")
    assert "Entropy 0.693" in second.get_by_test_id("head-entropy").inner_text()
    second.get_by_test_id("head-0-0").click()
    expect(second.get_by_test_id("head-high")).to_have_text("1.00")
    second.get_by_test_id("head").focus()
    for key in ("ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert second.get_by_test_id("head-readout").inner_text().startswith(f"dog → {MARKUP}")
    assert abs(float(second.get_by_test_id("head-bars-0").inner_text()) - 0.75) < 0.002
    second.get_by_test_id("tab-sentence").click()
    assert second.get_by_test_id("word-2").inner_text() == "<"
    counts("Smoler")

    # It is as dark as the notebook around it.
    ground = "element => getComputedStyle(element.getRootNode().host).backgroundColor"
    heading = second.get_by_role("heading", name="Self-attention of a sentence")
    assert heading.evaluate(ground) == "rgb(255, 255, 255)"
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    page.wait_for_function(
        f"e => ({ground})(e) != 'rgb(255, 255, 255)'", arg=heading.element_handle()
    )
    assert page.locator(".jp-CodeCell").count() == 3  # those two, and the empty one after them
    assert page.locator(".jp-OutputArea img").count() == 0
