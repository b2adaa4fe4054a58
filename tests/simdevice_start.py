"""Starts the simulator in a process of its own and says what came of it: the start-up tests' other half."""

from __future__ import annotations

import json
import sys

from diagkit.errors import DiagkitError


def main() -> None:
    """Prints the cache folder and a number from the device as JSON, or one line of error with exit code 2."""
    from diagkit.lab import simulate

    try:
        simulation = simulate()
    except DiagkitError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None
    import torch

    total = torch.arange(4.0, device="npu").sum().item()
    sys.stdout.write(json.dumps({"cache": str(simulation.cache), "total": total, "name": simulation.name}) + "\n")


def mesh() -> None:
    """Prints whether the device was initialised before a mesh was made, and the device that the mesh chose."""
    from diagkit.lab import simulate

    simulate(announce=False)
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    module = torch.get_device_module("npu")
    before = module.is_initialized()
    init_device_mesh("npu", (2,))
    print(json.dumps([before, module.current_device()]), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
