"""Tensors and process groups that do not fit each other."""

from __future__ import annotations

from diagkit.diagnosis.rule import Subject, rule
from diagkit.trace.schema import EXPORT, GRADIENT, PARAMETER


@rule("DK402", kinds=(PARAMETER, GRADIENT, EXPORT), severity="now", says=("no_backend",), rests=False)
def no_cpu_backend(it: Subject) -> bool:
    """A CPU tensor in a collective, and the process group has no CPU backend

    What happens: A DTensor whose bytes are on the CPU is about to be gathered or reduced (`full_tensor()`,
    `redistribute()`, the norm in `clip_grad_norm_`), and its mesh's process group was made for the accelerator
    alone (`init_process_group("nccl")` or `"hccl"`). It raises "No backend type associated with device type cpu".
    One rank hides it, because then nothing is communicated (torch 2.9 raises all the same). FSDP2's own all-gather is
    not concerned: it runs on the accelerator.

    How to see it: The storage device is cpu and the mesh's backends name no `cpu:`.

    Remedy: Give the group both backends, or bring each tensor to the mesh's device before it is gathered:
    `p.to(device).full_tensor()` for a healthy parameter.

    Call: init_process_group("cpu:gloo,npu:hccl")

    Seen in: pytorch #148532 #136156; torchtitan #1168; axolotl #3058; Automodel #3461; slime #847

    Detected by: facts of exported tensors; for parameters and gradients the exception, because under the policy
    they rest on the CPU rightly.

    Severity: now, at the collective.
    """
    tensor = it.tensor
    backends = it.group.backends if it.group else it.world.backends
    spread = it.group is None or it.group.mesh_size > 1 or "no_backend" in it.world.said
    # What was being handed out was sent, not the parameters: DK403.
    about_to = it.kind == EXPORT or ("no_backend" in it.world.said and not it.world.hands_out_host_tensors)
    lacks = bool(backends) and "cpu" not in {part.partition(":")[0] for part in backends.split(",")}
    return about_to and tensor.wrapper == "DTensor" and it.bytes_at == "cpu" and lacks and spread
