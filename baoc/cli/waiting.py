"""Sets how OpenMP's threads wait for each other at the end of a loop. Must run before torch is loaded.

By default they spin, which is fastest if no other process uses the cores. If one does, spinning threads take the cores
from the thread that they wait for.
"""

import os
from collections.abc import MutableMapping

# If the user has set one of these, nothing is changed.
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def sleep_where_shared(environment: MutableMapping[str, str] | None = None) -> bool:
    """Makes waiting threads sleep if other processes use these cores, unless the user has set VARIABLES.

    Returns whether it did.
    """
    environment = os.environ if environment is None else environment
    if any(name in environment for name in VARIABLES) or not cores_are_shared():
        return False
    environment["OMP_WAIT_POLICY"] = "PASSIVE"
    return True


def cores_are_shared() -> bool:
    """True if the load average of the last minute is above a quarter of the cores (and above 0.5)."""
    try:
        load = os.getloadavg()[0]
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    except OSError:
        return False
    return load > max(0.25 * cores, 0.5)
