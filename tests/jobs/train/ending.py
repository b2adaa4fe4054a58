"""How a job ends whose last collective ran on gloo."""

import time

import torch.distributed as dist


def end():
    """Ends the process group, and gives its threads a moment.

    A thread of gloo lets go of the last tensors after the collective is over. Where Python has ended meanwhile, torch
    2.13 asks it for its lock all the same (``ProcessGroupGloo::runLoop``) and the process is aborted: one run in 18.
    """
    dist.destroy_process_group()
    time.sleep(0.5)
