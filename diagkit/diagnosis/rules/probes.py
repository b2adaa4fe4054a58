"""What only a tensor's values, or that nobody wrote any, can show."""

from __future__ import annotations

from diagkit.diagnosis.rule import Subject, rule
from diagkit.trace.schema import BUFFER, Residency


@rule("DK502", kinds=(BUFFER,), severity="silent")
def buffer_without_values(it: Subject) -> bool:
    """Buffers uninitialised, or different by rank

    What happens: A model is built on meta and given memory by `to_empty`; weights are then loaded, and buffers that
    no checkpoint holds (non-persistent ones: rotary frequencies, masks, scales) keep whatever the memory held. Or
    rank 0 alone computes or loads them, and the broadcast covers parameters, or persistent buffers, only. The
    forward pass uses them without a word: zeros on a fresh allocation, old data on a reused one, and NaN some steps
    later; each rank may train another model.

    How to see it: The buffer was on meta, `to_empty` gave it bytes, and nothing has been written in place since;
    or, with values recorded, its digest differs between ranks from the first look on.

    Remedy: Compute non-persistent buffers again after `to_empty` (most models have a method for it, or give them
    their `__init__` once more), or broadcast *all* buffers from a rank that has them.

    Call: for b in model.buffers(): torch.distributed.broadcast(b, src=0)

    Seen in: transformers #45902; SkyRL #1709; LlamaFactory #10820

    Detected by: facts, for what nobody wrote since `to_empty` until it is used; an opt-in probe (`record(...,
    values=("buffers",))`) for what differs by rank. Set aside are what ranks write differently later, what a buffer
    exchanged as a whole got with its new tensor, what was empty at first, batch statistics (every rank's own without
    SyncBatchNorm) and whole numbers (a rank's offset or seed).

    Severity: silent; NaN later.
    """
    if it.other is not None:
        mine, theirs = it.tensor.digest, it.other.digest if isinstance(it.other, Residency) else None
        own = it.tensor.dtype.startswith(("int", "uint", "bool"))  # a rank's offset, seed or count
        return mine is not None and theirs is not None and mine != theirs and not own
    used = it.world.expects("train", "eval", "save", "export") or any(g.lazy_init == "done" for g in it.world.groups)
    return it.past.emptied and it.tensor.unwritten and used
