"""Libraries that only recorded episodes need, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, package: str, extra: str = "episodes") -> Any:
    """Imports `module`, or says which extra of worldserve brings `package`.

    Raises:
        ModuleNotFoundError: with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"recorded episodes need {package}, which is not installed here; "
            f"install it with: pip install 'worldserve[{extra}]'",
            name=error.name,
        ) from error
