"""Recorded episodes and sealed initial states.

`EpisodeWriter` and `EpisodeReader` keep `Episode`s in LeRobot's layout with lossless frames; `InitialStateSet` holds
the scenes that training, validation and test start from. Importing this needs numpy alone; reading and writing
episodes needs the extra `episodes`.
"""

from worldserve.episodes.episode import Episode, EpisodeInfo, frames_sha256
from worldserve.episodes.initial_states import (
    InitialState,
    InitialStateSet,
    SealedStateError,
    all_initial_states,
    refuse_for_training,
)
from worldserve.episodes.lerobot import import_lerobot
from worldserve.episodes.merge import merge_episodes
from worldserve.episodes.reader import EpisodeReader
from worldserve.episodes.robotwin import import_robotwin
from worldserve.episodes.video import VideoFrames, read_video, write_mp4
from worldserve.episodes.writer import EpisodeWriter

__all__ = [
    "Episode",
    "EpisodeInfo",
    "EpisodeReader",
    "EpisodeWriter",
    "InitialState",
    "InitialStateSet",
    "SealedStateError",
    "VideoFrames",
    "all_initial_states",
    "frames_sha256",
    "import_lerobot",
    "import_robotwin",
    "merge_episodes",
    "read_video",
    "refuse_for_training",
    "write_mp4",
]
