"""WorldArena's API over real HTTP in front of the example's world model: its clauses, one by one."""

from __future__ import annotations

import base64
import http.client
import io
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from examples.own_environment import GOALS, draw
from examples.own_world_model import OwnWorldModel
from worldserve.adapters.worldarena import ContractPredictor, Predictor, RequestError
from worldserve.adapters.worldarena_http import WorldArenaServer, start_worldarena_server
from worldserve.client import EnvironmentClient
from worldserve.messages import ItemError, ItemFailedError
from worldserve.serving import RunningServer, ServerSettings, start_environment_server

Image = pytest.importorskip("PIL.Image")
STATES = list(GOALS)[:3]
TOKEN = "a-token-of-the-test"


@pytest.fixture(scope="module")
def world_model() -> Iterator[RunningServer]:
    running = start_environment_server(OwnWorldModel(), None, ServerSettings())
    yield running
    running.stop(0)


@pytest.fixture(scope="module")
def server(world_model: RunningServer) -> Iterator[WorldArenaServer]:
    build = lambda: ContractPredictor(world_model.address, STATES, slots=2, timeout_s=20)  # noqa: E731
    running = start_worldarena_server(build, "127.0.0.1:0", TOKEN)
    assert running.service.wait_until_ready(60)
    yield running
    running.stop()


def call(
    server: WorldArenaServer, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, Any], Any]:
    connection = http.client.HTTPConnection(server.address, timeout=60)
    sent = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"} | headers
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, {name: value for name, value in sent.items() if value})
    response = connection.getresponse()
    document = json.loads(response.read())
    connection.close()
    return response.status, document, response.headers


def png(frame: np.ndarray, **save: Any) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "PNG", **save)
    text = base64.b64encode(buffer.getvalue()).decode()
    size = {"height": 36, "width": 36, "channels": 3}
    return {"encoding": "png_base64", "color_space": "RGB", **size, "data": text}


def pixels(image: dict[str, Any]) -> np.ndarray:
    opened = Image.open(io.BytesIO(base64.b64decode(image["data"])))
    assert (opened.format, opened.mode, opened.info) == ("PNG", "RGB", {})
    return np.asarray(opened)


def first_frame(state: str) -> np.ndarray:
    return draw(np.zeros(1), GOALS[state])[0]


def sample(state: str = STATES[0], actions: tuple[float, ...] = (0.1, 0.2, 0.3), seed: int = 7, **changes: Any) -> Any:
    context = {"frames": [png(first_frame(state))], "actions": [], "states": None, "instruction": "reach"}
    made = {"sample_id": "s0", "seed": seed, "context": context, "actions": [[action] for action in actions]}
    return {**made, **changes}


def request(server: WorldArenaServer, *samples: Any, **changes: Any) -> dict[str, Any]:
    capabilities = server.service.capabilities()
    made = {
        "api_version": "1.0",
        "request_id": str(uuid.uuid4()),
        "model_version": capabilities["model_version"],
        "profile_id": "worldserve-reach-v1",
        "samples": list(samples or (sample(),)),
    }
    return {**made, **changes}


def predict(server: WorldArenaServer, document: dict[str, Any]) -> list[list[np.ndarray]]:
    status, body, _ = call(server, "POST", "/v1/predict", document)
    assert status == 200, body
    assert (body["api_version"], body["request_id"]) == ("1.0", document["request_id"])
    assert body["model_version"] == document["model_version"]
    assert [item["sample_id"] for item in body["predictions"]] == [item["sample_id"] for item in document["samples"]]
    return [[pixels(frame) for frame in item["frames"]] for item in body["predictions"]]


def test_health_needs_no_token_and_the_rest_does(server: WorldArenaServer) -> None:
    status, body, _ = call(server, "GET", "/v1/health", Authorization="")
    assert (status, body["status"], body["api_version"]) == (200, "ready", "1.0")
    for wrong in ("", "Bearer another", TOKEN):
        for method, path in (("GET", "/v1/capabilities"), ("POST", "/v1/predict")):
            status, body, _ = call(server, method, path, {} if method == "POST" else None, Authorization=wrong)
            assert (status, body["error"]["code"], body["error"]["retryable"]) == (401, "UNAUTHENTICATED", False)


def test_capabilities_are_the_contracts(server: WorldArenaServer) -> None:
    status, body, _ = call(server, "GET", "/v1/capabilities")
    assert status == 200
    [profile] = body["profiles"]
    assert (profile["image"]["height"], profile["image"]["width"]) == (36, 36)
    assert profile["context_frames"] == {"min": 1, "max": 1}
    assert profile["prediction_frames"] == {"min": 1, "max": 4}
    assert profile["action"] == {"dtype": "float32", "dimension": 1, "representation": "joint_position_absolute"}
    assert profile["state"] == {"supported": False, "dimension": None}
    assert body["determinism"] == {"seed_supported": True, "same_seed_same_pixels": True}


def test_frame_j_shows_the_world_after_action_j(server: WorldArenaServer) -> None:
    [frames] = predict(server, request(server, sample(actions=(-0.5, 0.0, 0.5))))
    assert len(frames) == 3
    fingers = [int(frame[0, :, 0].argmax()) for frame in frames]
    assert fingers == [int(abs(np.linspace(-1, 1, 36) - finger).argmin()) for finger in (-0.5, 0.0, 0.5)]


def test_pixels_depend_on_the_sample_and_its_seed_alone(server: WorldArenaServer, world_model: RunningServer) -> None:
    alone = predict(server, request(server, sample()))[0]
    others = [sample(STATES[1], (0.9,), sample_id="s1"), sample(sample_id="s2"), sample(seed=8, sample_id="s3")]
    among = predict(server, request(server, *others))
    np.testing.assert_array_equal(among[1], alone)
    assert not np.array_equal(among[2], alone)
    assert [len(frames) for frames in among] == [1, 3, 3]
    with EnvironmentClient(world_model.address) as client:
        assert client.info().live == 0


def test_a_request_id_is_answered_once_and_refused_for_another_payload(server: WorldArenaServer) -> None:
    document = request(server)
    first = call(server, "POST", "/v1/predict", document)[1]
    # The same document in another order of keys and other white space is the same payload.
    again = json.dumps(dict(reversed(document.items())), indent=3).encode()
    assert call(server, "POST", "/v1/predict", again)[:2] == (200, first)
    status, body, _ = call(server, "POST", "/v1/predict", {**document, "samples": [sample(seed=8)]})
    assert (status, body["error"]["code"], body["error"]["retryable"]) == (409, "REQUEST_ID_CONFLICT", False)
    assert body["error"]["request_id"] == document["request_id"]


def test_a_refused_request_does_not_take_its_id(server: WorldArenaServer) -> None:
    name = str(uuid.uuid4())
    assert call(server, "POST", "/v1/predict", request(server, sample(actions=()), request_id=name))[0] == 400
    predict(server, request(server, request_id=name))


REFUSED: list[tuple[str, Callable[[dict[str, Any]], Any], int, str]] = [
    ("api", lambda d: d.update(api_version="2.0"), 422, "api_version: expected '1.0'; got '2.0'"),
    ("model", lambda d: d.update(model_version="another"), 422, "model_version: expected"),
    ("profile", lambda d: d.update(profile_id="another"), 422, "profile_id: expected"),
    ("no version", lambda d: d.pop("api_version"), 400, "api_version: expected a string"),
    ("id", lambda d: d.update(request_id="7"), 400, "request_id: expected a UUID"),
    ("none", lambda d: d.update(samples=[]), 400, "samples: expected 1 to 8 of them"),
    ("many", lambda d: d.update(samples=[sample(sample_id=str(n)) for n in range(9)]), 400, "samples: expected 1 to 8"),
    ("twice", lambda d: d["samples"].append(sample()), 400, "samples: expected each sample_id once"),
    ("seed", lambda d: d["samples"][0].update(seed=2**63), 400, "samples[0].seed: expected an integer from 0"),
    ("bool", lambda d: d["samples"][0].update(seed=True), 400, "samples[0].seed"),
    ("long", lambda d: d["samples"][0].update(actions=[[0.0]] * 5), 400, "samples[0].actions: expected 1 to 4 actions"),
    ("wide", lambda d: d["samples"][0].update(actions=[[0.0, 0.0]]), 400, "samples[0].actions[0] has dimension 2; expected 1"),
    ("text", lambda d: d["samples"][0].update(actions=[["0"]]), 400, "samples[0].actions[0]: expected numbers"),
    ("huge", lambda d: d["samples"][0].update(actions=[[1e39]]), 400, "finite float32"),
    ("huge integer", lambda d: d["samples"][0].update(actions=[[10**400]]), 400, "finite float32"),
    ("history", lambda d: d["samples"][0]["context"].update(actions=[[0.0]]), 400, "context.actions: expected 0 rows"),
    ("states", lambda d: d["samples"][0]["context"].update(states=[[0.0]]), 400, "context.states: expected null"),
    ("two frames", lambda d: d["samples"][0]["context"]["frames"].append(png(first_frame(STATES[0]))), 400, "expected 1 to 1 images"),
    ("unknown frame", lambda d: d["samples"][0]["context"].update(frames=[png(np.zeros((36, 36, 3), np.uint8))]), 400, "is no first frame of the 3 states"),
    ("size", lambda d: d["samples"][0]["context"].update(frames=[png(np.zeros((35, 36, 3), np.uint8))]), 400, "expected one RGB image of 36 x 36"),
    ("grey", lambda d: d["samples"][0]["context"].update(frames=[png(np.zeros((36, 36), np.uint8))]), 400, "expected one RGB image"),
    ("alpha", lambda d: d["samples"][0]["context"].update(frames=[png(np.zeros((36, 36, 4), np.uint8))]), 400, "expected one RGB image"),
    ("corrupt", lambda d: d["samples"][0]["context"]["frames"][0].update(data="aGVsbG8="), 400, "frames[0].data: expected a PNG"),
    ("cut", lambda d: d["samples"][0]["context"]["frames"][0].update(data=png(first_frame(STATES[0]))["data"][:80]), 400, "data: expected a PNG"),
    ("base64", lambda d: d["samples"][0]["context"]["frames"][0].update(data="data:image/png;base64,!"), 400, "data: expected a PNG"),
    ("encoding", lambda d: d["samples"][0]["context"]["frames"][0].update(encoding="jpeg"), 400, "the profile's image format"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "status", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_wrong_field_is_named(
    server: WorldArenaServer, change: Callable[[dict[str, Any]], Any], status: int, message: str
) -> None:
    document = request(server)
    change(document)
    got, body, _ = call(server, "POST", "/v1/predict", document)
    assert (got, body["error"]["retryable"]) == (status, False)
    assert body["error"]["code"] == {400: "INVALID_ARGUMENT", 422: "UNSUPPORTED_VERSION"}[status]
    assert message in body["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"{", b"[1]", b"\xff", b'{"seed": NaN}', b"[" * 100_000], ids=["cut", "list", "bytes", "NaN", "deep"]
)
def test_what_is_no_json_document_of_finite_numbers_is_refused(server: WorldArenaServer, body: bytes) -> None:
    status, document, _ = call(server, "POST", "/v1/predict", body)
    assert (status, document["error"]["code"], document["error"]["request_id"]) == (400, "INVALID_ARGUMENT", None)


def test_unknown_fields_are_ignored_and_unknown_paths_are_not(server: WorldArenaServer) -> None:
    predict(server, request(server, extra=1))
    assert call(server, "GET", "/v1/metrics")[0] == 404


def test_a_body_over_the_limit_is_refused_unread(server: WorldArenaServer) -> None:
    length = str(server.service.limits["max_request_bytes"] + 1)
    status, body, headers = call(server, "POST", "/v1/predict", b"{}", **{"Content-Length": length})
    assert (status, body["error"]["code"], headers["Connection"]) == (413, "PAYLOAD_TOO_LARGE", "close")


class _Held:
    """The predictor of another server, that waits or fails as a test says."""

    def __init__(self, inner: Predictor, raised: Exception | None = None) -> None:
        self.profile, self.model_version, self._inner, self._raised = inner.profile, inner.model_version, inner, raised
        self.entered, self.released = threading.Event(), threading.Event()

    def predict(self, samples: Any) -> Any:
        self.entered.set()
        if self._raised is not None:
            raise self._raised
        assert self.released.wait(60)
        return self._inner.predict(samples)


def refused(code: str) -> ItemError:
    return ItemError(code, "A_REASON", "items[0]", "a free place", "none at 10.0.0.7", "Try again.")


def predictor_of(server: WorldArenaServer) -> Predictor:
    made = server.service._predictor
    assert made is not None
    return made


def test_one_more_than_may_run_is_429_and_says_when_to_come_back(server: WorldArenaServer) -> None:
    held = _Held(predictor_of(server))
    busy = start_worldarena_server(lambda: held, "127.0.0.1:0", TOKEN)
    assert busy.service.wait_until_ready(60)
    document, statuses = request(server), []
    first = threading.Thread(target=lambda: statuses.append(call(busy, "POST", "/v1/predict", document)[0]))
    first.start()
    assert held.entered.wait(60)
    status, body, headers = call(busy, "POST", "/v1/predict", request(server))
    assert (status, body["error"]["code"], body["error"]["retryable"]) == (429, "OVERLOADED", True)
    assert headers["Retry-After"] == "1"
    assert call(busy, "GET", "/v1/health")[1]["status"] == "ready"
    held.released.set()
    first.join(60)
    assert statuses == [200]
    busy.stop()


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (ConnectionError("10.0.0.7 is away"), 503, "NOT_READY"),
        (TimeoutError("10.0.0.7 is slow"), 504, "DEADLINE_EXCEEDED"),
        (ItemFailedError([refused("RESOURCE_EXHAUSTED")]), 429, "OVERLOADED"),
        (ItemFailedError([refused("UNAVAILABLE"), refused("RESOURCE_EXHAUSTED")]), 503, "NOT_READY"),
        (ItemFailedError([refused("UNAVAILABLE"), refused("INTERNAL")]), 500, "INTERNAL"),
        (RuntimeError("/secret/path"), 500, "INTERNAL"),
        (RequestError(400, "INVALID_ARGUMENT", "samples[0]"), 400, "INVALID_ARGUMENT"),
    ],
)
def test_failures_are_retryable_where_they_may_pass_and_tell_nothing_of_the_inside(
    server: WorldArenaServer, raised: Exception, status: int, code: str
) -> None:
    held = _Held(predictor_of(server), raised)
    failing = start_worldarena_server(lambda: held, "127.0.0.1:0", TOKEN)
    assert failing.service.wait_until_ready(60)
    document = request(server)
    for _ in range(2):  # the place is given back, and the id may be tried again
        got, body, _ = call(failing, "POST", "/v1/predict", document)
        assert (got, body["error"]["code"], body["error"]["retryable"]) == (status, code, status >= 429)
        assert "10.0.0.7" not in json.dumps(body)
        assert "secret" not in json.dumps(body)
    failing.stop()


def test_until_the_model_is_loaded_it_is_starting_and_503(server: WorldArenaServer) -> None:
    gate = threading.Event()

    def build() -> Predictor:
        gate.wait(60)
        return predictor_of(server)

    slow = start_worldarena_server(build, "127.0.0.1:0", TOKEN)
    assert call(slow, "GET", "/v1/health")[1]["status"] == "starting"
    status, body, _ = call(slow, "POST", "/v1/predict", request(server))
    assert (status, body["error"]["code"], body["error"]["retryable"]) == (503, "NOT_READY", True)
    gate.set()
    assert slow.service.wait_until_ready(60)
    assert call(slow, "GET", "/v1/health")[1]["status"] == "ready"
    slow.stop()


def test_a_model_that_cannot_be_loaded_stays_unavailable(caplog: pytest.LogCaptureFixture) -> None:
    def build() -> Predictor:
        raise ValueError("/secret/weights")

    broken = start_worldarena_server(build, "127.0.0.1:0", TOKEN)
    assert not broken.service.wait_until_ready(60)
    status, body, _ = call(broken, "GET", "/v1/health")
    assert (status, body["error"]["code"]) == (503, "NOT_READY")
    assert "secret" not in json.dumps(body)
    broken.stop()


def test_a_restart_keeps_version_and_capabilities(server: WorldArenaServer, world_model: RunningServer) -> None:
    again = ContractPredictor(world_model.address, STATES, timeout_s=20)
    assert again.model_version == predictor_of(server).model_version
    assert again.profile == predictor_of(server).profile
    again.close()
