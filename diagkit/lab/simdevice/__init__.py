"""A simulated accelerator in host memory, under real PyTorch: a device, its memory, streams, collectives.

Source in C++ beside this file: memory.h, streams.h, hooks.h, host_views.h, kernels.h, autocast.h, device.cpp, hccl.cpp.
"""

from diagkit.lab.simdevice.start import Simulation, running, simulate

__all__ = ["Simulation", "running", "simulate"]
