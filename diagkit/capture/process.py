"""Who is recording: rank, host, device, versions. Read once, initialising nothing."""

from __future__ import annotations

import os
import platform
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from diagkit import __version__
from diagkit import torch_internals as internals
from diagkit.trace.schema import Header


def describe(detail: str, run: str | None = None, job: Mapping[str, Any] | None = None) -> Header:
    """This process, for the head of its trace. ``run`` defaults to the launcher's id: the ranks of a job agree."""
    rank, world = internals.rank_and_world()
    device, simulated = internals.accelerator()
    return Header(
        run=run or os.environ.get("DIAGKIT_RUN") or os.environ.get("TORCHELASTIC_RUN_ID") or _own_run_id(world),
        rank=rank,
        world_size=world,
        local_rank=_number(os.environ.get("LOCAL_RANK")),
        host=socket.gethostname(),
        pid=os.getpid(),
        torch=torch.__version__,
        python=platform.python_version(),
        device=device,
        device_index=internals.accelerator_index(device),
        device_name="simulated accelerator" if simulated else "",
        device_memory=internals.accelerator_memory(device),
        device_uuid=internals.accelerator_uuid(device),
        visible_devices=_visible_devices(),
        simulated=simulated,
        backends=internals.group_backends(),
        detail=detail,
        argv=tuple(sys.argv[:50]),
        revision=_revision(Path(sys.argv[0] or ".").resolve().parent),
        job=dict(job or {}),
        diagkit=__version__,
    )


#: What narrows down a process's devices, and what a container's.
_VISIBLE = (
    ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    ("NVIDIA_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES"),
)


def _visible_devices() -> str:
    chosen, around = (next(filter(None, map(os.environ.get, names)), "") for names in _VISIBLE)
    return f"{chosen};{around}" if around else chosen


def _own_run_id(world: int) -> str:
    # Ranks of one job without a launcher's id share the rendezvous address, which no two jobs on a host share at a
    # time.
    if world > 1:
        return f"{os.environ.get('MASTER_ADDR', 'job')}-{os.environ.get('MASTER_PORT', '0')}"
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _revision(folder: Path) -> str:
    """The commit that the script's repository is at, "" where it is in none. Reads two small files, runs nothing."""
    try:
        for place in (folder, *folder.parents)[:12]:
            git = place / ".git"
            if not git.is_dir():
                continue
            head = (git / "HEAD").read_text().strip()
            if not head.startswith("ref: "):
                return head[:40]
            ref = head[5:]
            loose = git / ref
            if loose.is_file():
                return loose.read_text().strip()[:40]
            for line in (git / "packed-refs").read_text().splitlines():
                if line.endswith(" " + ref):
                    return line[:40]
            return ""
    except (OSError, UnicodeDecodeError):
        pass
    return ""
