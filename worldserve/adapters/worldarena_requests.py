"""A body of `POST /v1/predict` to samples and back: every field checked before anything is drawn."""

from __future__ import annotations

import base64
import binascii
import io
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worldserve.adapters.worldarena import API_VERSION, Predictor, Profile, RequestError, Sample, image_format

_LONGEST_INSTRUCTION = 1000
_LONGEST_ID = 256
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def invalid(message: str) -> RequestError:
    """A field that no retry mends."""
    return RequestError(400, "INVALID_ARGUMENT", message)


def parse_json(body: bytes) -> dict[str, Any]:
    """The document. Raises RequestError unless it is a JSON object of finite numbers."""

    def refuse(name: str) -> Any:
        raise invalid(f"body: expected finite numbers; got {name}")

    try:
        document = json.loads(body.decode("utf-8"), parse_constant=refuse)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise invalid("body: expected a UTF-8 JSON document") from None
    if not isinstance(document, dict):
        raise invalid("body: expected a JSON object")
    return document


def request_id_of(document: Mapping[str, Any]) -> str:
    """The request's UUID, as it was written."""
    value = document.get("request_id")
    try:
        uuid.UUID(value if isinstance(value, str) else "")
    except ValueError:
        raise invalid("request_id: expected a UUID") from None
    return str(value)


def samples_of(document: Mapping[str, Any], predictor: Predictor, max_batch_size: int) -> list[Sample]:
    """The request's samples. Raises RequestError naming the first field that is wrong; nothing is partial."""
    expected = {
        "api_version": API_VERSION,
        "model_version": predictor.model_version,
        "profile_id": predictor.profile.profile_id,
    }
    for name, value in expected.items():
        got = document.get(name)
        if not isinstance(got, str):
            raise invalid(f"{name}: expected a string")
        if got != value:
            raise RequestError(422, "UNSUPPORTED_VERSION", f"{name}: expected {value!r}; got {got[:80]!r}")
    items = document.get("samples")
    if not isinstance(items, list) or not 1 <= len(items) <= max_batch_size:
        raise invalid(f"samples: expected 1 to {max_batch_size} of them")
    samples = [_sample(f"samples[{number}]", item, predictor.profile) for number, item in enumerate(items)]
    if len({sample.sample_id for sample in samples}) != len(samples):
        raise invalid("samples: expected each sample_id once")
    return samples


def _sample(name: str, item: Any, profile: Profile) -> Sample:
    if not isinstance(item, dict) or not isinstance(item.get("context"), dict):
        raise invalid(f"{name}: expected an object with a context")
    sample_id, seed, context = item.get("sample_id"), item.get("seed"), item["context"]
    if not isinstance(sample_id, str) or not 1 <= len(sample_id) <= _LONGEST_ID:
        raise invalid(f"{name}.sample_id: expected a string of 1 to {_LONGEST_ID} characters")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise invalid(f"{name}.seed: expected an integer from 0 through 2^63-1")
    frames = context.get("frames")
    low, high = profile.context_frames
    if not isinstance(frames, list) or not low <= len(frames) <= high:
        raise invalid(f"{name}.context.frames: expected {low} to {high} images")
    instruction = context.get("instruction")
    if instruction is not None and not (isinstance(instruction, str) and len(instruction) <= _LONGEST_INSTRUCTION):
        raise invalid(f"{name}.context.instruction: expected a string of at most {_LONGEST_INSTRUCTION} characters")
    low, high = profile.prediction_frames
    count = len(item["actions"]) if isinstance(item.get("actions"), list) else 0
    if not low <= count <= high:
        raise invalid(f"{name}.actions: expected {low} to {high} actions")
    return Sample(
        sample_id, seed,
        np.stack([_image(f"{name}.context.frames[{number}]", image, profile) for number, image in enumerate(frames)]),
        _matrix(f"{name}.context.actions", context.get("actions"), len(frames) - 1, profile.action_dimension),
        _states(f"{name}.context.states", context.get("states"), len(frames), profile),
        instruction,
        _matrix(f"{name}.actions", item["actions"], count, profile.action_dimension),
    )  # fmt: skip


def _states(name: str, rows: Any, count: int, profile: Profile) -> NDArray[np.float32] | None:
    if rows is None:
        return None
    if profile.state_dimension is None:
        raise invalid(f"{name}: expected null; this profile reads no states")
    return _matrix(name, rows, count, profile.state_dimension)


def _matrix(name: str, rows: Any, count: int, dimension: int) -> NDArray[np.float32]:
    if not isinstance(rows, list) or len(rows) != count:
        raise invalid(f"{name}: expected {count} rows")
    for number, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != dimension:
            got = len(row) if isinstance(row, list) else "no list"
            raise invalid(f"{name}[{number}] has dimension {got}; expected {dimension}")
        if any(isinstance(value, bool) or not isinstance(value, int | float) for value in row):
            raise invalid(f"{name}[{number}]: expected numbers")
        # Past float32 a finite number would become infinity; JSON's own 1e999 is one already.
        if any(not abs(value) <= _LARGEST_FLOAT32 for value in row):
            raise invalid(f"{name}[{number}]: expected finite float32 numbers")
    return np.array(rows, np.float32).reshape(count, dimension)


def _image(name: str, image: Any, profile: Profile) -> NDArray[np.uint8]:
    from PIL import Image

    expected = image_format(profile)
    if not isinstance(image, dict) or any(image.get(field) != value for field, value in expected.items()):
        raise invalid(f"{name}: expected the profile's image format, {expected}")
    try:
        data = base64.b64decode(image.get("data", ""), validate=True)
        with Image.open(io.BytesIO(data), formats=["PNG"]) as opened:
            # Before a pixel is decoded: a small file may hold a huge image.
            size, moving = (profile.width, profile.height), getattr(opened, "n_frames", 1) > 1
            if opened.mode != "RGB" or opened.size != size or moving:
                raise invalid(f"{name}.data: expected one RGB image of {profile.height} x {profile.width}, 8 bits")
            return np.asarray(opened, np.uint8).copy()
    except RequestError:
        raise
    except (binascii.Error, TypeError, ValueError, OSError, SyntaxError):
        raise invalid(f"{name}.data: expected a PNG in standard Base64") from None


def encode_image(frame: NDArray[np.uint8], profile: Profile) -> dict[str, Any]:
    """A frame uint8 (height, width, 3) as the API's image; equal pixels give equal text."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(frame)).save(buffer, "PNG", compress_level=1)
    return {**image_format(profile), "data": base64.b64encode(buffer.getvalue()).decode("ascii")}


def response_of(
    request_id: str, predictor: Predictor, samples: Sequence[Sample], drawn: Sequence[NDArray[np.uint8]]
) -> bytes:
    """The body of a success."""
    predictions = [
        {"sample_id": sample.sample_id, "frames": [encode_image(frame, predictor.profile) for frame in frames]}
        for sample, frames in zip(samples, drawn, strict=True)
    ]
    body = {
        "api_version": API_VERSION,
        "request_id": request_id,
        "model_version": predictor.model_version,
        "predictions": predictions,
    }
    return json.dumps(body, allow_nan=False).encode()
