"""Interface faults made on purpose: each of the mistakes that raise no error, as a setting of the client.

    with open_client("127.0.0.1:50051", ["arms_swapped"]) as client:
        ...

They prove `worldserve contract probe`, and let a study show what a mistake costs. They combine.
"""

from worldserve.faults.catalogue import FAULTS, check_faults, describe, layers
from worldserve.faults.client import FaultyClient, open_client

__all__ = ["FAULTS", "FaultyClient", "check_faults", "describe", "layers", "open_client"]
