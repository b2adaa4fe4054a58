"""Tensors that were handed out: exports, weight synchronisation."""

from __future__ import annotations

from diagkit.diagnosis.rule import Subject, rule
from diagkit.trace.schema import EXPORT, PARAMETER


@rule("DK204", kinds=(EXPORT,), severity="silent")
def export_aliases_live_storage(it: Subject) -> bool:
    """An export aliases live storage, and the storage was written while the export was held

    What happens: Not every export is a copy. Under the offload policy parameters are on the CPU already, so
    `get_model_state_dict(cpu_offload=True)` copies nothing; on one rank `full_tensor()` hands out the local tensor;
    a lazy generator yields aliases. The next optimizer step or load writes in place, and whoever reads the export
    after that (a sender in another thread, an asynchronous checkpoint, a comparison with "the weights before") gets
    the new values, or half of each, without a word.

    How to see it: The exported tensor's storage is its parameter's (`untyped_storage().data_ptr()`), and something
    still holds it when the parameter is written.

    Remedy: Clone what outlives the operation that exports it, or finish reading before anything writes; let go of
    it then.

    Call: weights = {name: tensor.clone() for name, tensor in weights.items()}

    Seen in: pytorch #144657 #145408; verl #7014; prime-rl #2729

    Detected by: events: exports that pass through an attached engine or `rec.exported`, the number of tensors on
    their storage, and the next observed write. That it is read afterwards is not seen: an export that is only kept
    is told, too. Plain state dicts, which alias by design, are not followed.

    Severity: silent.
    """
    return it.tensor.shares == "written"


@rule("DK205", kinds=(EXPORT,), severity="silent")
def stale_snapshot(it: Subject) -> bool:
    """Stale snapshot: the first forward gave parameters other storages, and an export kept the old ones

    What happens: A sharded state dict aliases the parameters, and some code relies on that: it takes the state dict
    once and sends it again after each step. If it was taken before the first forward, lazy init may exchange the
    storage beneath it. Before torch 2.13 that happened on every rank whose shard is padded, so that the dict was
    live on some ranks and frozen on others. On torch 2.13 lazy init leaves storages alone, unless it has to pin a
    parameter that lost its pin (DK701); only in that way could it be produced there.

    How to see it: The exported tensor's storage was its parameter's, and is not any more, since the first forward.

    Remedy: Take the state dict again after the first forward, or at each use.

    Call: weights = model.state_dict()

    Seen in: pytorch #136228

    Detected by: events: exports that pass through an attached engine or `rec.exported`, and the storages after the
    first forward. Plain state dicts are not followed.

    Severity: silent; differs by rank.
    """
    return it.tensor.shares == "stale"


@rule("DK403", kinds=(EXPORT, PARAMETER), severity="now", says=("no_backend", "other_device"), rests=False)
def host_tensor_in_accelerator_channel(it: Subject) -> bool:
    """A host tensor given to an accelerator's channel, or a device that is not there named in the code

    What happens: Under the offload policy an export that does not stage its tensors yields CPU tensors, also where
    the same code without the policy yields accelerator tensors. Weight synchronisation sends them through a group
    that was made for the accelerator alone, and raises "No backend type associated with device type cpu"; where the
    group has a CPU backend as well, the sender's tensors go through it while the receivers wait on the
    accelerator's. Its sibling is code that names a device type: `.to("cuda")` on an NPU node.

    How to see it: The exported tensor is a plain tensor on the CPU, the mesh is the accelerator's; or the exception
    names a device type that this machine does not have.

    Remedy: Bring each tensor to the mesh's device before it is sent, one at a time. Take the device type from the
    mesh, never from a literal and never from the first parameter.

    Call: tensor = tensor.to(mesh.device_type)

    Seen in: prime-rl #3045 #3049; trl #6592; ms-swift #9314

    Detected by: the exception, with the facts of what was exported until then. A CPU export alone is no fault: a
    checkpoint wants it so.

    Severity: now, at the first send.
    """
    said, accelerator = it.world.said, it.world.accelerator
    if accelerator is None:
        return False
    if it.kind == EXPORT and "no_backend" in said:
        return it.bytes_at == "cpu" and it.tensor.wrapper != "DTensor"
    failure = it.world.failure  # None where it is only asked what could be
    elsewhere = "other_device" in said and (failure is None or accelerator not in failure.message.lower())
    return elsewhere and (it.kind == EXPORT or not it.world.exports)
