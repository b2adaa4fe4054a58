"""Eight ranks of one job: in the first save one is killed and one waits for another that never comes.

Forked from one process that has everything imported, as some launchers do; ``python eight.py FOLDER`` is that process.
It says which rank ended how, as soon as all but those two have ended, and waits for a word before it kills one.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

RANKS, KILLED, WAITING, LATE = 8, 3, 5, 4


class Trainer:
    """The job's own engine."""

    def __init__(self, rank):
        self.rank = rank
        self.pair = dist.new_group([LATE, WAITING], backend="gloo")
        torch.manual_seed(0)
        mesh = init_device_mesh("npu", (RANKS,))
        self.model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))
        for part in (*self.model, self.model):
            fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train_batch(self):
        self.model(torch.ones(2, 16, device="npu")).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self):
        self.model.state_dict()
        if self.rank == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.rank == WAITING:
            dist.barrier(self.pair)


def work(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    trainer = Trainer(rank)
    trainer.train_batch()
    dist.barrier()
    trainer.save()


def main(folder):
    import diagkit.auto  # noqa: F401
    from diagkit.lab import simulate

    simulate()
    torch.set_num_threads(1)
    children = {}
    for rank in range(RANKS):
        child = os.fork()
        if not child:
            work(rank, folder)
            # Rank 0 holds the others' store: it must not leave before they have used it. And a barrier notices when
            # the other side is gone, so the late rank stays until the waiting one is dead.
            time.sleep(1)
            while rank == LATE and not os.path.exists(f"{folder}/dead"):
                time.sleep(0.1)
            sys.exit(0)
        children[child] = rank
    ends = {}
    while len(ends) < RANKS - 2:
        child, status = os.wait()
        ends[children[child]] = os.waitstatus_to_exitcode(status)
    print(sorted(ends.items()), flush=True)
    sys.stdin.readline()
    os.kill(next(child for child, rank in children.items() if rank == WAITING), signal.SIGKILL)
    open(f"{folder}/dead", "w").close()
    for _ in range(2):
        os.wait()


if __name__ == "__main__":
    main(sys.argv[1])
