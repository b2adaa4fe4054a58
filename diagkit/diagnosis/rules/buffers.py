"""Buffers, which no policy looks after."""

from __future__ import annotations

from diagkit.diagnosis.rule import Subject, rule
from diagkit.trace.schema import BUFFER


@rule("DK501", kinds=(BUFFER,), severity="now", says=("same_device",))
def buffer_left_on_cpu(it: Subject) -> bool:
    """Buffers left on the CPU

    What happens: FSDP2 offloads parameters; buffers stay where they are put, and the forward pass needs them on the
    accelerator. `model.to("cpu")`, the usual way to mend split parameters, drags them along, and so does an
    engine's offload. The next forward raises "Expected all tensors to be on the same device", unless the model
    moves the buffer itself at each use.

    How to see it: A buffer's device is cpu while the mesh is the accelerator's, and it was on the accelerator before.

    Remedy: Move the buffers alone; parameters under the policy must not be moved with them. After the exception
    `dk.heal(model, optimizer)` does it, at any other time `dk.heal(model, optimizer, buffers=True)`.

    Call: dk.heal(model, optimizer, buffers=True)  # or by hand:

    for b in model.buffers(): b.data = b.data.to(device)

    Seen in: prime-rl #1636; VeOmni #776; torchtitan #624; transformers #45859

    Detected by: the change from the accelerator to the CPU between two moments at rest, or the exception. Buffers
    that have always rested on the CPU are information and no fault: some models train so.

    Severity: now, at the next forward.
    """
    rested = it.past.rested
    dragged = rested is not None and rested not in ("cpu", "meta") and it.world.offloads
    failed = "same_device" in it.world.said
    return (
        it.bytes_at == "cpu" and it.computes_on not in (None, "cpu") and bool(it.world.groups) and (dragged or failed)
    )
