"""The device module of the simulated accelerator: what ``torch.npu`` is while it stands in.

Rules: the names and meanings are those of ``torch.cuda`` and ``torch_npu.npu`` as far as FSDP2, DCP, checkpointing,
autocast and random-number handling ask for them; every number comes from the device library, none is made up here.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch

SIMULATED_NAME = "Simulated NPU (host memory)"


def make_device_module(name: str) -> types.ModuleType:
    """Builds the module that becomes ``torch.<name>``; ``name`` is the device type, such as ``"npu"``."""
    module = types.ModuleType(f"torch.{name}", f"Simulated accelerator {name!r}, brought by diagkit.")
    functions: dict[str, Any] = {
        **_devices(name, module),
        **_streams(name),
        **_memory(name),
        **_random(name),
        **_autocast(name),
    }
    for key, value in functions.items():
        setattr(module, key, value)
    amp = types.ModuleType(f"torch.{name}.amp", "Autocast for the simulated accelerator.")
    amp.autocast = lambda *args, **kwargs: torch.autocast(name, *args, **kwargs)  # type: ignore[attr-defined]
    module.amp = amp  # type: ignore[attr-defined]
    module.is_simulated = True  # type: ignore[attr-defined]
    return module


def _index(device: Any) -> int:
    if device is None:
        return int(torch.accelerator.current_device_index())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(torch.accelerator.current_device_index()) if index is None else index


def _devices(name: str, module: types.ModuleType) -> dict[str, Any]:
    def lazy_init() -> None:
        # PyTorch calls it at the first use from Python, as it does for torch.cuda; until then `init_device_mesh` may
        # choose the device by LOCAL_RANK.
        module._initialized = True  # type: ignore[attr-defined]

    class device:
        """Makes a device current inside a ``with``; ``device=None`` and negative indices change nothing."""

        def __init__(self, device: Any) -> None:
            self.index = -1 if device is None else _index(device)

        def __enter__(self) -> None:
            self.before = int(torch.accelerator.current_device_index())
            if self.index >= 0:
                torch.accelerator.set_device_index(self.index)

        def __exit__(self, *_: object) -> None:
            torch.accelerator.set_device_index(self.before)

    class device_of(device):
        """Makes the device of a tensor current inside a ``with``."""

        def __init__(self, obj: Any) -> None:
            super().__init__(obj.device.index if obj.device.type == name else None)

    def get_device_properties(device: Any = None) -> types.SimpleNamespace:
        free_total = (
            torch.accelerator.get_memory_info(_index(device))
            if hasattr(torch.accelerator, "get_memory_info")
            else (0, 0)
        )
        return types.SimpleNamespace(
            name=SIMULATED_NAME, total_memory=free_total[1], multi_processor_count=1, major=0, minor=0
        )

    return {
        "device": device,
        "device_of": device_of,
        "is_available": lambda: True,
        "is_initialized": lambda: bool(module._initialized),
        "_initialized": False,  # activation checkpointing keeps random states only of a device that says so
        "init": lazy_init,
        "_lazy_init": lazy_init,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: int(torch.ops.diagkit_sim.device_count()),
        "current_device": lambda: int(torch.accelerator.current_device_index()),
        "_get_device_index": lambda device=None, optional=False, allow_cpu=False: _index(device),
        "set_device": lambda device: torch.accelerator.set_device_index(_index(device)),
        "get_device_name": lambda device=None: SIMULATED_NAME,
        "get_device_properties": get_device_properties,
        "get_device_capability": lambda device=None: (0, 0),
        "synchronize": lambda device=None: torch.accelerator.synchronize(_index(device)),
        "can_device_access_peer": lambda device, peer: True,
        "is_bf16_supported": lambda: True,
    }


def _streams(name: str) -> dict[str, Any]:
    class Stream(torch.Stream):
        """A stream with an identity; it orders nothing, because kernels end before they return."""

        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
            if "stream_id" in kwargs:
                return torch.Stream.__new__(cls, **kwargs)
            return torch.Stream.__new__(cls, torch.device(name, _index(device)), priority=priority)

    class EventType(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, torch.Event)

    class Event(metaclass=EventType):
        """An event of the simulated accelerator; timed ones measure host time in milliseconds."""

        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
            # PyTorch compares events by their exact type: an instance of a subclass could not be waited for.
            return torch.Event(name, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(_index(device))

    def default_stream(device: Any = None) -> torch.Stream:
        return torch.Stream(
            stream_id=0, device_index=_index(device), device_type=torch._C._autograd.DeviceType.PrivateUse1.value
        )

    @contextlib.contextmanager
    def stream(stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        device = torch.accelerator.current_device_index()
        before = torch.accelerator.current_stream(stream.device.index)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(device)

    return {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": lambda stream: torch.accelerator.set_stream(stream),
    }


def _memory(name: str) -> dict[str, Any]:
    accelerator = torch.accelerator

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        free, total = accelerator.get_memory_info(_index(device))
        return int(free), int(total)

    return {
        "memory_allocated": lambda device=None: int(accelerator.memory_allocated(_index(device))),
        "max_memory_allocated": lambda device=None: int(accelerator.max_memory_allocated(_index(device))),
        "memory_reserved": lambda device=None: int(accelerator.memory_reserved(_index(device))),
        "max_memory_reserved": lambda device=None: int(accelerator.max_memory_reserved(_index(device))),
        "memory_stats": lambda device=None: accelerator.memory_stats(_index(device)),
        "reset_peak_memory_stats": lambda device=None: accelerator.reset_peak_memory_stats(_index(device)),
        "reset_accumulated_memory_stats": lambda device=None: accelerator.reset_accumulated_memory_stats(
            _index(device)
        ),
        "empty_cache": lambda: accelerator.empty_cache(),
        "mem_get_info": mem_get_info,
        "ipc_collect": lambda: None,
        "host_memory_pinned": lambda: int(torch.ops.diagkit_sim.pinned_bytes()),
    }


def _random(name: str) -> dict[str, Any]:
    def generator(device: Any = None) -> torch.Generator:
        return _default_generators(name)[_index(None if device == name else device)]

    def get_rng_state(device: Any = name) -> torch.Tensor:
        return generator(device).get_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = name) -> None:
        generator(device).set_state(new_state)

    def every() -> list[torch.Generator]:
        return _default_generators(name)

    def set_rng_state_all(states: list[torch.Tensor]) -> None:
        for one, state in zip(every(), states, strict=False):
            one.set_state(state)

    def manual_seed_all(seed: int) -> None:
        for one in every():
            one.manual_seed(seed)

    return {
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [one.get_state() for one in every()],
        "set_rng_state_all": set_rng_state_all,
        "manual_seed": lambda seed: generator().manual_seed(seed) and None,
        "manual_seed_all": manual_seed_all,
        "seed": lambda: generator().seed() and None,
        "seed_all": lambda: manual_seed_all(generator().seed()),
        "initial_seed": lambda: generator().initial_seed(),
        "default_generators": every(),
    }


_generators: dict[str, list[torch.Generator]] = {}


def _default_generators(name: str) -> list[torch.Generator]:
    if name not in _generators:
        count = int(torch.ops.diagkit_sim.device_count())
        _generators[name] = [torch.ops.diagkit_sim.default_generator(i) for i in range(count)]
    return _generators[name]


def _autocast(name: str) -> dict[str, Any]:
    return {
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_autocast_enabled": lambda: torch.is_autocast_enabled(name),
        "set_autocast_enabled": lambda on: torch.set_autocast_enabled(name, on),
        "get_autocast_dtype": lambda: torch.get_autocast_dtype(name),
        "set_autocast_dtype": lambda dtype: torch.set_autocast_dtype(name, dtype),
    }
