"""A simulated accelerator in host memory, under real PyTorch: a device, its memory, streams, collectives.

Source in C++ beside this file, in reading order: memory.h, streams.h, hooks.h, host_views.h, kernels.h, autocast.h,
device.cpp (these make one library), hccl.cpp (the other). build.py compiles them, start.py loads them, device_module.py
is what ``torch.npu`` becomes.

What it is not: a performance model (kernels finish before they return), a home for sparse or quantized tensors, fused
LSTM cells, DLPack or ``torch.compile`` kernels. Matrix values are the CPU's, so what an accelerator rounds differently
does not show.
"""

from diagkit.lab.simdevice.start import Simulation, running, simulate

__all__ = ["Simulation", "running", "simulate"]
