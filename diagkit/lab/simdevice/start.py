"""Starts the simulated accelerator in this process.

Rules: it starts only when asked; never beside a real accelerator's plug-in; once in a process, and asking again gives
the same answer; what it changes in PyTorch (a device, a device module, a collective backend) stays until the process
ends, because PyTorch has no way back.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from diagkit.errors import SimulatorError, UsageError
from diagkit.lab.simdevice import build

BACKEND = "hccl"


@dataclass(frozen=True)
class Simulation:
    """The simulated accelerator as it runs in this process.

    ``name`` is the device type ("npu"), ``device_count`` the number of its devices, ``backend`` its collective backend,
    ``torch`` the version it was compiled for, ``cache`` the folder with the compiled libraries. ``simulated`` is always
    True: whoever shows a result shows this beside it.
    """

    name: str
    device_count: int
    backend: str
    torch: str
    cache: Path
    simulated: bool = True

    def set_capacity(self, size: int, device: int | None = None) -> None:
        """Limits a device (default: each) to ``size`` bytes (0: no limit); beyond it ``torch.OutOfMemoryError``."""
        import torch

        for index in range(self.device_count) if device is None else [device]:
            torch.ops.diagkit_sim.set_capacity(index, size)

    def set_deferred_copies(self, on: bool) -> None:
        """With ``on``, ``non_blocking`` copies into pinned memory arrive when the host synchronises, not before."""
        import torch

        torch.ops.diagkit_sim.set_deferred_copies(on)


_running: Simulation | None = None


def running() -> Simulation | None:
    """The simulation of this process, or None where none was started."""
    return _running


def simulate(name: str = "npu", *, announce: bool = True) -> Simulation:
    """Starts the simulated accelerator under the device type ``name``; a second call returns the first one's answer.

    Registers ``torch.<name>``, 8 devices and the collective backend ``hccl``. ``announce`` prints one line before a
    compilation. Raises :class:`SimulatorError` beside ``torch_npu`` or another renamed backend,
    :class:`UsageError` for a second name, and what :func:`diagkit.lab.simdevice.build.built` raises.
    """
    global _running
    if _running is not None:
        if _running.name != name:
            raise UsageError(
                "the simulated accelerator already runs under another name", found=name, expected=_running.name
            )
        return _running
    _refuse_beside_a_real_one()
    folder = build.built(announce=announce)

    import torch

    torch.ops.load_library(str(folder / "device.so"))
    from torch.utils.backend_registration import (
        generate_methods_for_privateuse1_backend,
        rename_privateuse1_backend,
    )

    rename_privateuse1_backend(name)
    torch.ops.diagkit_sim.start()
    from diagkit.lab.simdevice.device_module import make_device_module

    module = make_device_module(name)
    torch._register_device_module(name, module)
    sys.modules.setdefault(f"torch.{name}", module)
    generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    _register_collectives(name, folder)
    _running = Simulation(
        name=name,
        device_count=int(torch.ops.diagkit_sim.device_count()),
        backend=BACKEND,
        torch=str(torch.__version__),
        cache=folder,
    )
    return _running


def _refuse_beside_a_real_one() -> None:
    plugin = None
    with contextlib.suppress(ImportError, ValueError):
        plugin = importlib.util.find_spec("torch_npu")
    if plugin is not None or "torch_npu" in sys.modules:
        raise SimulatorError(
            "the simulated accelerator is never started beside a real one",
            found="torch_npu is installed",
            remedy="Use the real device (--device npu), or an environment without torch_npu",
        )
    build.torch_facts()
    import torch

    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise SimulatorError(
            "PyTorch's free device type is already taken in this process",
            found=taken,
            expected="no other out-of-tree accelerator",
            remedy="Start a process without it",
        )


def _register_collectives(name: str, folder: Path) -> None:
    import torch.distributed as dist

    if not dist.is_available():
        return
    library = _load_extension("hccl", folder / "hccl.so")

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        from torch.distributed import ProcessGroupGloo

        return library.Hccl(ProcessGroupGloo(store, rank, size, timeout=timeout))

    dist.Backend.register_backend(BACKEND, create, devices=[name])
    # torch 2.9 fills this map for its own devices only; without it `init_process_group()` cannot choose by itself.
    dist.Backend.default_device_backend_map.setdefault(name, BACKEND)


def _load_extension(name: str, path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SimulatorError("a compiled library cannot be loaded", found=str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
