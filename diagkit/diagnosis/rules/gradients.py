"""Gradients apart from their parameters."""

from __future__ import annotations

from diagkit.diagnosis.rule import Subject, rule
from diagkit.trace.schema import GRADIENT


@rule("DK301", kinds=(GRADIENT,), severity="now", says=("same_device",), follows=("DK101", "DK102", "DK103a", "DK103b"))
def stranded_gradient(it: Subject) -> bool:
    """Stranded gradient: a gradient's bytes are on another device than its parameter's

    What happens: `.to(device)` takes gradients along with the parameters; the offload policy then brings the
    parameter's bytes back to the CPU and leaves the gradient on the accelerator. Or an engine moved parameters
    between backward and step and left the gradients. The next `optimizer.step()` raises "Expected all tensors to be
    on the same device"; a further backward adds a CPU gradient to an accelerator one and raises as well.

    How to see it: The storage device of `p.grad` differs from that of `p`.

    Remedy: Step and `zero_grad()` before anything is moved. A gradient that is not needed any more is dropped; one that
    is needed is copied to its parameter's device, which `dk.heal(model, optimizer)` does. A step that failed half-way
    has already counted and decayed the parameters that it reached: load those again.

    Call: dk.heal(model, optimizer)  # or without them:

    optimizer.zero_grad(set_to_none=True)

    Seen in: verl #4218 #1978; pytorch #135156

    Detected by: facts.

    Severity: now, at the optimizer step.
    """
    if it.owner is None or it.owner.storage_device is None or it.tensor.storage_device is None:
        return False
    at = it.owner.storage_device.partition(":")[0]
    return it.bytes_at not in (at, "meta") and at != "meta" and not it.tensor.empty
