"""Calls to a target: the items that may pass are sent again, and what cannot pass is told briefly."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from worldserve.messages import ItemError, ItemFailedError

RETRYABLE_CODES = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "ABORTED", "INTERNAL"})
MAX_RETRIES = 4
MAX_BACKOFF_S = 5.0


def brief(error: ItemFailedError) -> str:
    """The first failed item and how many more there were: a batch fails as one, and its items say the same."""
    more = f" ({len(error.errors) - 1} more items of the call failed.)" if len(error.errors) > 1 else ""
    return f"{error.errors[0]}{more}"


def retried(call: Callable[[Any], list[Any]], items: list[Any]) -> list[Any]:
    """Send items; send again those with an error that may pass. Both calls are idempotent, so this is safe."""
    replies = call(items)
    for attempt in range(MAX_RETRIES):
        again = [i for i, r in enumerate(replies) if isinstance(r, ItemError) and r.code in RETRYABLE_CODES]
        if not again:
            break
        wait_s = max(max(replies[i].retry_after_s or 0.0 for i in again), 0.05 * 2**attempt)
        time.sleep(min(wait_s, MAX_BACKOFF_S))
        for i, reply in zip(again, call([items[i] for i in again]), strict=True):
            replies[i] = reply
    hopeless = [r for r in replies if isinstance(r, ItemError) and r.code not in RETRYABLE_CODES]
    if hopeless:
        raise ItemFailedError(hopeless)
    return replies
