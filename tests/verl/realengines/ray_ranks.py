"""Run one cell with Ray actors as ranks: ``python -m realengines.ray_ranks --cell JSON --out DIR --env JSON``.

The actors are given environment variables through ``runtime_env`` and nothing else. What they do before verl is
imported, starting the simulated accelerator, stands for the machine that they would run on.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import ray

from realengines import driver
from realengines.cells import Cell


@ray.remote(num_cpus=1, max_restarts=0)
class Rank:
    """One rank of the job."""

    def run(self, fields: dict[str, object], rank: int, out: str) -> str:
        """Do the cell's operation and return how it ended; the actor lives on, as verl's workers do."""
        cell = Cell(**fields)  # type: ignore[arg-type]
        driver.prepare(cell.engine == "veomni")
        driver.run_rank(cell, rank, Path(out), Path(out) / "model")
        return "ok"


def main() -> int:
    """Start the actors, wait for them, print one line for each rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", type=json.loads, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--env", type=json.loads, default={}, help="JSON: variables for the actors alone")
    options = parser.parse_args()
    cell = Cell(**options.cell)
    out = options.out.resolve()
    (out / cell.name).mkdir(parents=True)
    driver.write_model(out / "model")
    # A folder with a short name: sockets are made in it.
    with tempfile.TemporaryDirectory(prefix="ray-") as temporary:
        ray.init(
            num_cpus=cell.ranks,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            _node_ip_address="127.0.0.1",
            _temp_dir=temporary,
        )
        actors = [Rank.options(runtime_env={"env_vars": dict(options.env)}).remote() for _ in range(cell.ranks)]
        asked = [actor.run.remote(cell.as_dict(), rank, str(out)) for rank, actor in enumerate(actors)]
        for rank, answer in enumerate(asked):
            try:
                print(f"rank {rank}: {ray.get(answer, timeout=300)}", flush=True)
            except ray.exceptions.RayTaskError as error:
                print(f"rank {rank}: {type(error.cause).__name__}", flush=True)
        ray.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
