"""Copies between devices, and who is too early."""

from __future__ import annotations

from diagkit.diagnosis.rule import Subject, rule
from diagkit.trace.schema import EXPORT


@rule("DK703", kinds=(EXPORT,), severity="silent")
def copy_read_too_early(it: Subject) -> bool:
    """An asynchronous copy read too early

    What happens: `tensor.to("cpu", non_blocking=True)`, or `copy_` into pinned memory, returns while the bytes are
    still on their way. Whoever reads the host tensor before the device was waited for gets what the memory held
    before: zeros, or the weights of the step before. It does no harm as long as the same stream orders both sides,
    so it works in most runs and fails under load. A whole-model move with `non_blocking=True` makes every tensor
    such a copy.

    How to see it: A `non_blocking` copy to the host, and a read on the host with no `synchronize()` and no event
    between.

    Remedy: Wait once after the last copy, or copy blocking.

    Call: torch.accelerator.synchronize()

    Seen in: pytorch #180665 #180666; prime-rl #1694 #3109; verl #7347

    Detected by: full detail: copies of watched or exported tensors, and reads through `item`, `tolist`, `numpy`,
    `clone`, `sum`, `copy_`, `torch.save` and the senders of `torch.distributed`. Whoever asks for a stream or an
    event in between is taken to wait. That the copy had in fact arrived is not seen; the simulated accelerator can
    be told to let every such copy be late.

    Severity: silent.
    """
    return it.tensor.arrival == "read early"
