"""Optimizer state apart from its parameters."""

from __future__ import annotations

from diagkit.diagnosis.rule import Subject, rule
from diagkit.trace.schema import OPTIMIZER_STATE, device_type


@rule("DK302", kinds=(OPTIMIZER_STATE,), severity="now", says=("same_device",), follows=("DK102", "DK103a", "DK103b"))
def stranded_state(it: Subject) -> bool:
    """Optimizer state on the wrong device

    What happens: Moments were moved, or loaded, to another device than their parameter's bytes. An engine that
    loads the optimizer to the accelerator by hand does this under the offload policy, and
    `optimizer.load_state_dict()` does it while the parameters are split: it casts to the device that the wrapper
    claims. The next step raises "Expected all tensors to be on the same device". A `step` counter on the
    accelerator of an optimizer that is neither fused nor capturable does not raise: each step then waits for the
    device.

    How to see it: The storage device of `exp_avg` (or its like) differs from that of the parameter; or
    `state["step"]` is not on the CPU.

    Remedy: Under the policy leave the optimizer alone: its state is born on the CPU, where the parameters are. Mend
    by moving the entries to their parameter's bytes, and load optimizer state only into a healthy model.

    Call: for p, s in optimizer.state.items(): s.update({k: v.to("cpu") for k, v in s.items()})

    Seen in: UniRL #441; prime-rl #2729; pytorch #144397 #117476

    Detected by: facts. Without the policy, state that an engine parked on the CPU is a fault only when a step fails.

    Severity: now, at the optimizer step; slow for the step counter.
    """
    if it.owner is None or it.owner.storage_device is None or it.bytes_at in (None, "meta") or it.tensor.empty:
        return False
    if it.part == "step":
        deliberate = any(o.fused or o.capturable for o in it.world.optimizers)
        return it.bytes_at != "cpu" and it.offloaded and not deliberate
    parked = not it.offloaded and "same_device" not in it.world.said
    return not it.tensor.split and it.bytes_at != device_type(it.owner.storage_device) and not parked
