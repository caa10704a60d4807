"""The description: what schemathesis makes of it is answered as it says."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis
from schemathesis.config._checks import NegativeDataRejectionConfig, PositiveDataAcceptanceConfig
from schemathesis.engine import events, from_schema
from starlette.testclient import TestClient

from qkv.serve.app import create_app
from qkv.serve.security import Access
from tests.sampling import FULL
from tests.serve.conftest import serving

TOKEN = "a-token-that-writes"
CASES = 2000 if FULL else 150
EXAMPLES_PER_ROUTE = 70 if FULL else 5
STATUSES = {200, 400, 401, 404, 405, 415, 422} | ({409} if FULL else set())


def test_every_case_is_answered_as_described(tmp_path: Path, caplog: Any) -> None:
    """All checks of schemathesis on every route, in-process. Two are configured for this API:
    400 and 415 for what does not fit the description and nothing else, 422 for what fits it and
    has no meaning."""
    served, seen = serving(tmp_path), Counter[int]()
    inner = create_app(served, Access(TOKEN, "a-token-that-reads"), hosts=["testserver"])

    async def lasting(scope: Any, receive: Any, send: Any) -> None:
        """The app, which schemathesis starts and ends for every case, as one that stays."""
        if scope["type"] == "lifespan":
            for what in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{what}.complete"})
            return

        async def sent(message: Any) -> None:
            seen[message.get("status", 0)] += message["type"] == "http.response.start"
            await send(message)

        await inner(scope, receive, sent)

    caplog.set_level(logging.CRITICAL, "qkv")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, of other packages
        head = {"Authorization": f"Bearer {TOKEN}"}
        schema = schemathesis.openapi.from_asgi("/openapi.json", lasting, headers=head)
        config = schema.config
        config.update(headers=head)
        config.generation.update(max_examples=EXAMPLES_PER_ROUTE, deterministic=True)
        config.continue_on_failure = True
        config.checks.positive_data_acceptance = PositiveDataAcceptanceConfig(
            expected_statuses=["2xx", "403", "404", "409", "413", "422"]
        )
        config.checks.negative_data_rejection = NegativeDataRejectionConfig(
            expected_statuses=["400", "401", "404", "405", "415"]
        )
        faults = [fault for event in from_schema(schema).execute() for fault in _faults(event)]
    served.close()
    assert not faults, "\n\n".join(faults[:5])
    assert sum(seen.values()) >= CASES, seen
    assert set(seen) >= STATUSES
    assert max(seen) < 500, seen


def _faults(event: Any) -> list[str]:
    if isinstance(event, events.NonFatalError):
        return [f"{event.label}: {event.value}"]
    if isinstance(event, events.FatalError):
        return [str(event.exception)]
    if not isinstance(event, events.ScenarioFinished):
        return []
    return [
        f"{check.name}: {check.failure_info.failure.message}\n{check.failure_info.code_sample}"
        for checks in event.recorder.checks.values()
        for check in checks
        if check.failure_info is not None
    ]


def test_it_is_written_from_the_routes(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    ask = document["paths"]["/v1/databases/{name}/ask"]["post"]
    body = ask["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert document["components"]["schemas"][body.rpartition("/")[2]]["properties"]["top"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 1000,
    }
    names = ask["parameters"][0]["schema"]["enum"]
    assert names == ["books", "grades", "vectors", "places"]
    each = [way["operationId"] for path in document["paths"].values() for way in path.values()]
    assert len(each) == len(set(each))
