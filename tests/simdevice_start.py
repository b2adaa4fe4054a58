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


if __name__ == "__main__":
    main()
