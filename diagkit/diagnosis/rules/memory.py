"""Memory of the wrong kind, and memory held for nothing."""

from __future__ import annotations

from diagkit.diagnosis.rule import Subject, rule
from diagkit.trace.schema import PARAMETER


@rule("DK701", kinds=(PARAMETER,), severity="slow")
def pin_lost(it: Subject) -> bool:
    """Pin lost: the policy wants pinned memory, and the bytes that all-gather reads are pageable

    What happens: `CPUOffloadPolicy(pin_memory=True)` pins each shard once. Code that exchanges the memory behind a
    storage in place unpins it for both handles at once: `share_memory_()` on local tensors, to show them to another
    process, does. Values stay right. Copies to the accelerator are no longer asynchronous, so each layer waits for
    its own. What makes FSDP2 look at its shards again makes a silent fault of a slow one: the first forward,
    `load_state_dict` and the obvious mend, `model.to("cpu")`, find the storage unchanged, pin a copy for the local
    tensor alone, and part the two handles (DK201).

    How to see it: `p._local_tensor.is_pinned()` is False on parameters with elements, and the policy's `pin_memory` is
    True. Ask of `FSDPParam._sharded_param_data` too: it is what is copied.

    Remedy: Share a copy, not the parameter; or choose `CPUOffloadPolicy(pin_memory=False)`. To pin again give each
    parameter new memory, as `dk.heal(model, optimizer)` does, or through the module: FSDP2 then pins it. Where the
    system refuses to pin (`ulimit -l`), `fully_shard` itself raises.

    Call: dk.heal(model, optimizer)  # or by hand:

    model._apply(torch.clone)

    Seen in: pytorch #157146 #119878; axolotl #2743; prime-rl #3552

    Detected by: facts.

    Severity: slow; training is right until the first forward or a load parts the handles.
    """
    return it.pins and not it.tensor.empty and it.tensor.flat_device == "cpu" and it.tensor.flat_pinned is False


@rule("DK702", kinds=(PARAMETER,), severity="memory")
def keeps_the_whole(it: Subject) -> bool:
    """Memory held twice: a shard keeps the whole tensor's memory

    What happens: `load_state_dict(assign=True)` takes the tensors that it is given. Where a shard was cut out as a view
    (`full.chunk(n)[rank]`, a slice of one large checkpoint buffer), its storage is that of the whole: each rank holds
    all of the model, and sharding saves nothing. Training is right, and out of memory before its time.

    How to see it: `p._local_tensor.untyped_storage().nbytes()` is a multiple of `p._local_tensor.nbytes`.

    Remedy: Give `load_state_dict` copies (`shard.clone()`), or load with `assign=False`. To mend, copy each shard into
    memory of its own; the whole is freed at the next garbage collection.

    Call: model._apply(torch.clone); gc.collect()

    Seen in: pytorch #95823 #134051; verl #7286 #1517; transformers #45649

    Detected by: facts, for shards. Whole tensors that a script's own variables keep alive belong to no watched model
    and cannot be seen; an optimizer that keeps the unsharded parameters alive is DK202.

    Severity: memory; training is right while it lasts.
    """
    return it.tensor.roomy and not it.tensor.empty
