"""The same jobs under Ray, one actor a rank: ``python ray_job.py WAY`` (needs ray)."""

from __future__ import annotations

import os
import sys

import ray


@ray.remote(num_cpus=0)
class WorkerDict:
    def __init__(self, rank: int, world_size: int, port: int) -> None:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME="lo",
        )

    def run(self, way: str) -> None:
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        import job

        print(f"worker of rank {os.environ['RANK']} starts")
        job.run(way)


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}})
    workers = [WorkerDict.remote(rank, 2, int(sys.argv[2])) for rank in range(2)]
    ray.get([worker.run.remote(sys.argv[1]) for worker in workers])
