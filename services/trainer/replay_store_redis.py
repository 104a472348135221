"""The replay store in Redis: for runs on several machines.

worldserve:replay:infos            hash, episode id to facts (JSON)
worldserve:replay:episode:ID       one episode (safetensors, zlib)

Both keys of an episode change in one transaction. Needs the client library (`pip install redis`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from services.trainer.replay_store import (
    StoredEpisode,
    StoredInfo,
    decode,
    decode_info,
    encode,
    encode_info,
    missing,
    place,
)

PREFIX = "worldserve:replay"


class RedisStore:
    """A database of a Redis server."""

    def __init__(self, url: str, prefix: str = PREFIX) -> None:
        """Raises ConnectionError where nobody answers, RuntimeError without the client library."""
        try:
            import redis
        except ModuleNotFoundError as error:
            raise RuntimeError(
                "store: Redis needs its client library: pip install '.[redis]' in the checkout"
            ) from error
        self._where, self._prefix = url.rpartition("@")[2], prefix  # no password in a message
        self._redis: Any = redis.Redis.from_url(url, socket_timeout=30, socket_connect_timeout=5)
        try:
            self._redis.ping()
        except redis.exceptions.RedisError as error:
            self._redis.close()
            raise ConnectionError(
                f"store: expected a Redis server at {self._where}; {error}. Start one (`redis-server`), or name a "
                "directory as --store."
            ) from error

    def append(self, episodes: Iterable[StoredEpisode]) -> None:
        """As in `ReplayStore`."""
        for episode in episodes:
            name = episode.info.episode_id
            with self._redis.pipeline(transaction=True) as both:
                both.set(self._key(name), encode(episode))
                both.hset(f"{self._prefix}:infos", name, encode_info(episode.info))
                both.execute()

    def infos(self) -> list[StoredInfo]:
        """As in `ReplayStore`."""
        return sorted((decode_info(text) for text in self._redis.hvals(f"{self._prefix}:infos")), key=place)

    def read(self, episode_id: str) -> StoredEpisode:
        """As in `ReplayStore`."""
        with self._redis.pipeline(transaction=True) as both:
            both.get(self._key(episode_id))
            both.hget(f"{self._prefix}:infos", episode_id)
            data, info = both.execute()
        if info is None:
            raise KeyError(missing(episode_id, self._where))
        if data is None:
            raise ValueError(f"episode {episode_id!r}: its bytes are gone from {self._where} (evicted?); drop it")
        return decode(data, decode_info(info))

    def drop(self, episode_ids: Collection[str]) -> None:
        """As in `ReplayStore`."""
        if not episode_ids:
            return
        with self._redis.pipeline(transaction=True) as both:
            both.hdel(f"{self._prefix}:infos", *episode_ids)
            both.delete(*(self._key(name) for name in episode_ids))
            both.execute()

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()

    def __enter__(self) -> RedisStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _key(self, episode_id: str) -> str:
        return f"{self._prefix}:episode:{episode_id}"
