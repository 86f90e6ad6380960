"""Measures the inputs of a plan: the network, its gradients, and the device.

`describe`: names, shapes and roles of parameters. `gradients`: statistics of gradients by block. `footprint`: the bytes
of a training step. `latency`, `step_time`: seconds. `link`: copy rates. `memory`: CUDA context and cap.
"""

from baoc.profiling.describe import describe
from baoc.profiling.footprint import FirstStepMemory, probe_footprint, step_temporary_bytes
from baoc.profiling.gradients import GradientProfiler
from baoc.profiling.latency import measure_latency
from baoc.profiling.link import measure_link
from baoc.profiling.memory import (
    cap_device,
    clear_cache,
    context_bytes,
    current_context_bytes,
    device_peak_bytes,
    free_bytes,
    recap_device,
    uncap_device,
    uncapped,
)
from baoc.profiling.tracker import MemoryTracker
