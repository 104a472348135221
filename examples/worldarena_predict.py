"""A prediction through WorldArena's HTTP API, with the standard library and Pillow alone.

python -m worldserve.adapters.worldarena --target 127.0.0.1:50052 --bind 127.0.0.1:8080 \
    --initial-states adjust_bottle/train/0000 &
python -m examples.worldarena_predict http://127.0.0.1:8080 first_frame.png predicted.gif
"""

import base64
import io
import json
import os
import sys
import urllib.request
import uuid
from pathlib import Path

from PIL import Image


def ask(url, body=None):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('WORLDARENA_TOKEN', '')}"}
    with urllib.request.urlopen(urllib.request.Request(url, body and json.dumps(body).encode(), headers)) as reply:
        return json.load(reply)


def main(argv):
    service, context, out = argv
    capabilities = ask(f"{service}/v1/capabilities")
    profile = capabilities["profiles"][0]
    frame = {**profile["image"], "data": base64.b64encode(Path(context).read_bytes()).decode()}
    steps, dimension = profile["prediction_frames"]["max"], profile["action"]["dimension"]
    sample = {
        "sample_id": "sample-0",
        "seed": 0,
        "context": {"frames": [frame], "actions": [], "instruction": None},
        "actions": [[0.0] * dimension] * steps,
    }
    body = {
        "api_version": capabilities["api_version"],
        "request_id": str(uuid.uuid4()),
        "model_version": capabilities["model_version"],
        "profile_id": profile["profile_id"],
        "samples": [sample],
    }
    [prediction] = ask(f"{service}/v1/predict", body)["predictions"]
    frames = [Image.open(io.BytesIO(base64.b64decode(image["data"]))) for image in prediction["frames"]]
    frames[0].save(out, save_all=True, append_images=frames[1:], duration=60)
    print(f"{len(frames)} frames of {frames[0].size} in {out}")


if __name__ == "__main__":
    main(sys.argv[1:])
