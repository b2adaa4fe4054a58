"""Measures one state on the torch that is installed, on request: in a subprocess, never inside a job.

The measuring program is `diagkit.demo.predictions`; it is started by name, so that this room needs no torch and imports
nothing above it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from diagkit.diagnosis.predictions.facets import Facets
from diagkit.diagnosis.predictions.lookup import Prediction, predict, read_table, tables
from diagkit.errors import SimulatorError, UsageError

# What a launcher tells its ranks; a measurement beside a job must not believe that it is one of them.
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def measure(state: Facets, timeout: float = 300) -> Prediction:
    """What each operation does in the measured state nearest to this one, tried now.

    Raises:
        UsageError: nothing like this state is known.
        SimulatorError: the measurement did not come to an end.
    """
    known = predict(state)
    if known is None:
        raise UsageError("no state like this one can be brought about", found=str(state))
    newest = max(tables().values(), key=lambda table: known.state in table.names)
    name = newest.names[known.state]
    env = {
        key: value for key, value in os.environ.items() if key not in _LAUNCHERS and not key.startswith("TORCHELASTIC")
    }
    command = [sys.executable, "-m", "diagkit.demo.predictions", "--probe", name]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise SimulatorError(
            "the measurement took too long", found=f"{timeout:g} s", remedy="Allow more time"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SimulatorError("the measurement failed", found=last)
    table = read_table(json.loads(done.stdout.splitlines()[-1]))
    found = predict(state, table=table)
    if found is None:
        raise SimulatorError("the measurement brought another state about", found=", ".join(table.names.values()))
    return found
