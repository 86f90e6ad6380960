"""What a network, its gradients and a device are like: all that a plan is made of, measured or read off.

describe (names, shapes, roles) · gradients and shadow (what blocks can do without) · footprint and tracker (bytes) ·
latency (seconds) · link (copies) · device (context, cap).
"""

from baoc.profiling.describe import describe, named_tensors
from baoc.profiling.footprint import FirstStepMemory, probe_footprint, step_temporary_bytes
from baoc.profiling.gradients import GradientProfiler
from baoc.profiling.latency import measure_latency
from baoc.profiling.link import measure_link
from baoc.profiling.memory import (
    cap_device,
    clear_cache,
    context_bytes,
    context_now,
    free_bytes,
    recap_device,
    uncap_device,
    uncapped,
)
from baoc.profiling.tracker import MemoryTracker

__all__ = [
    "FirstStepMemory",
    "GradientProfiler",
    "MemoryTracker",
    "cap_device",
    "clear_cache",
    "context_bytes",
    "context_now",
    "describe",
    "free_bytes",
    "measure_latency",
    "measure_link",
    "named_tensors",
    "probe_footprint",
    "recap_device",
    "step_temporary_bytes",
    "uncap_device",
    "uncapped",
]
