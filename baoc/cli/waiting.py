"""How OpenMP's threads wait for each other at the end of a loop: set before torch is loaded, which reads it once.

By default they spin, which is fastest on cores of one's own. Where another process is busy on these cores too, a step
waits for a thread that is not running while the others spin.
"""

import os
from collections.abc import MutableMapping

# Of the user: any of these says how threads wait, so nothing is set beside it.
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def sleep_where_shared(environment: MutableMapping[str, str] | None = None) -> bool:
    """Makes waiting threads sleep where other processes want these cores, unless the user has said how they wait.

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
