"""Makes one data set of several, without decoding a frame."""

from __future__ import annotations

import os
from collections.abc import Sequence

from worldserve.episodes.reader import EpisodeReader
from worldserve.episodes.writer import EpisodeWriter


def merge_episodes(sources: Sequence[str | os.PathLike[str]], directory: str | os.PathLike[str]) -> int:
    """Appends the episodes of `sources` to `directory` and returns how many were added.

    Episodes that are there already are skipped. Videos are copied as they are. Interrupted, it goes on where it
    stopped.
    """
    added = 0
    reader = EpisodeReader(sources)
    with EpisodeWriter(directory, action_period_ms=float(1000 / reader.frames_per_second)) as writer:
        for episode in reader:
            if episode.episode_id not in writer:
                writer.append(episode)
                added += 1
    return added
