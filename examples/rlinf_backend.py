"""A chunk of frames as RLinf's WorldModelEnv asks its backend for it.

python -m examples.rlinf_backend 127.0.0.1:50052 adjust_bottle/train/0000 adjust_bottle/train/0001

In RLinf: return RemoteWorldModelBackend(targets, num_envs, initial_states) from a WorldModelEnv's `_build_backend`,
with initial_states in the order of its data set's episodes.
"""

import sys

import torch

from worldserve.adapters.rlinf_backend import RemoteWorldModelBackend


def main(argv):
    backend = RemoteWorldModelBackend(argv[0], num_envs=2, initial_states=argv[1:], frame_tolerance=None)
    blank = torch.zeros(3, 1, *backend.image_size)  # of RLinf's data set; frame_tolerance checks it against the server
    backend.open_session([0, 1], [[blank], [blank]], None, task_ids=[0, 0], seeds=[0, 0])
    actions = torch.zeros(2, backend.chunk, backend.action_dim)
    video = backend.generate([0, 1], actions)
    print(f"frames {tuple(video.shape)} in [{video.min():.2f}, {video.max():.2f}]")
    backend.close_session([0, 1])
    backend.close()


if __name__ == "__main__":
    main(sys.argv[1:])
