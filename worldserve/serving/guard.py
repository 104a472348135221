"""Faults of backends and judges on their way to a caller: an `ItemError`, and the text in the log alone."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

from worldserve.messages import ItemError
from worldserve.serving import errors

Outcome = TypeVar("Outcome")
_log = logging.getLogger("worldserve.engine")


def guarded(
    call: Callable[[], Sequence[Outcome | ItemError]],
    count: int,
    name: str = "backend",
    passing: type[Exception] | tuple[type[Exception], ...] = (),
) -> list[Outcome | ItemError]:
    """Runs a call of backend or judge; an exception becomes INTERNAL for every item, its text only in the log.

    Args:
        call: returns an outcome an item.
        count: of items.
        name: whose call it is, for the error and the log.
        passing: exceptions that the caller handles. Only a judge's ConnectionError means that a service is away: a
            backend's, such as the BrokenPipeError of a worker, is a fault like any other.
    """
    try:
        outcomes = list(call())
        if len(outcomes) != count:
            raise RuntimeError(f"expected {count} outcomes; got {len(outcomes)}")
        return outcomes
    except passing:
        raise
    except Exception:  # the loop cannot die of one backend's fault; the log has the traceback
        reference = uuid.uuid4().hex[:12]
        _log.exception("%s call failed [%s]", name, reference)
        return [errors.internal(name, reference)] * count


def broken(name: str, complaint: str) -> ItemError:
    """A backend's answer that breaks its promise: the text stays in the log."""
    reference = uuid.uuid4().hex[:12]
    _log.error("%s [%s]", complaint, reference)
    return errors.internal(name, reference)
