"""worldserve: simulators, video world models and reward models behind one explicit, checked contract."""

from worldserve.version import __version__

__all__ = ["__version__"]
