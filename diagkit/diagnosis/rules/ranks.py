"""Ranks beside each other."""

from __future__ import annotations

from dataclasses import replace

from diagkit.diagnosis.rule import Subject, rule
from diagkit.diagnosis.seats import Seat
from diagkit.trace.schema import (
    BUFFER,
    GRADIENT,
    GROUP,
    OPTIMIZER_STATE,
    PARAMETER,
    Facts,
    GroupFacts,
    Residency,
    device_type,
)


def alike_on_all_ranks(facts: Facts | None) -> Facts | None:
    """Of these facts what must be the same on every rank; None where nothing must.

    Which device of its kind, what is not on this rank, and what still has no bytes (before rank 0's weights are
    spread) may differ.
    """
    if isinstance(facts, Residency):
        if facts.empty or facts.unreadable or facts.metadata_device == "meta":
            return None
        return replace(
            facts,
            metadata_device=device_type(facts.metadata_device) or "",
            storage_device=device_type(facts.storage_device),
            flat_device=device_type(facts.flat_device),
            pinned=None,  # of a shard that is moved by hand its padding decides; DK701 tells lost pins
            flat_pinned=None,
            roomy=False,
            # Values are every rank's own but for what is no parameter.
            digest=None if facts.wrapper == "DTensor" or facts.requires_grad else facts.digest,
        )
    if isinstance(facts, GroupFacts) and not facts.unreadable:
        return GroupFacts(
            offload=facts.offload,
            pin_memory=facts.pin_memory,
            policy=facts.policy,
            policy_flags=facts.policy_flags,
            mesh_device=facts.mesh_device,
            backends=facts.backends,
            parameters=facts.parameters,
        )
    return None


@rule(
    "DK801",
    kinds=(PARAMETER, BUFFER, GRADIENT, OPTIMIZER_STATE, GROUP),
    severity="hang",
    follows=("DK101", "DK102", "DK103a", "DK103b", "DK301", "DK302", "DK501", "DK701"),
)
def ranks_disagree(it: Subject) -> bool:
    """Ranks disagree: one tensor is in different states on different ranks

    What happens: A branch on the rank (`if rank == 0: model.to(device)`), a retry on one rank alone, or an option
    that some ranks read differently leaves one tensor in two states. Each rank may look healthy by itself. The next
    collective meets what the others do not expect: one rank raises before it while the others wait for it, or sends
    more than they take (a layer frozen on one rank is enough), until a connection breaks or the watchdog ends the
    job and blames whoever waited.

    How to see it: Held beside each other, the ranks' metadata device, storage device, dtype, handles or
    policy differ for one name.

    Remedy: Undo on the odd ranks what they alone did; where it was right, do it on every rank instead. Compare the
    ranks before the first collective, not after the hang.

    Call: torch.distributed.all_gather_object(seen, [(n, str(p.device)) for n, p in model.named_parameters()])

    Seen in: pytorch #138842; VeOmni #642; slime #915

    Detected by: facts of at least two ranks, at the ends of phases and of the trace. Indices of devices, pinning,
    uneven and empty shards, and tensors that are on meta while rank 0 loads are set aside; so is what differs
    inside a phase alone.

    Severity: hang, or an exception on one rank alone.
    """
    mine, theirs = alike_on_all_ranks(it.facts), alike_on_all_ranks(it.other)  # type: ignore[arg-type]
    return mine is not None and theirs is not None and _without_values(mine) != _without_values(theirs)


def _without_values(facts: Facts) -> Facts:
    return replace(facts, digest=None, unwritten=False) if isinstance(facts, Residency) else facts


@rule("DK803", kinds=(), severity="memory")
def one_device_for_two(it: Subject) -> bool:
    """Wrong device: two ranks of one node compute on the same physical device

    What happens: `set_device(local_rank)` was forgotten, or came after the model was wrapped, so every rank took
    device 0; or the visible devices of two workers overlap. All shards of the node are then held by one device, and
    the others idle: it runs out of memory at a fraction of the expected size. NCCL refuses ("Duplicate GPU
    detected"), other backends may wait for each other.

    How to see it: Host and physical device (its UUID; else the index among the visible devices) are the same on two
    ranks.

    Remedy: Call `set_device(local_rank)` before the mesh is made and before `fully_shard`; give each worker visible
    devices of its own.

    Call: torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))

    Seen in: own finding; any launcher without one visible device per worker

    Detected by: host, UUID and visible devices in the trace's header, with the device on which FSDP2 computes.
    Where each worker sees one device of its own (Ray), every rank says index 0 rightly. On the simulated
    accelerator each process has a memory of its own, so that there the fault is seen and does no damage.

    Severity: memory; hang.
    """
    return isinstance(it.facts, Seat) and isinstance(it.other, Seat) and it.facts.same(it.other)
