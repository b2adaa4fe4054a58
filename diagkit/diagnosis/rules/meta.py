"""Tensors that never got bytes."""

from __future__ import annotations

from diagkit.diagnosis.rule import Subject, rule
from diagkit.trace.schema import BUFFER, PARAMETER


@rule("DK104", kinds=(PARAMETER, BUFFER), severity="later", says=("meta",))
def left_on_meta(it: Subject) -> bool:
    """Left on meta: the tensor has a shape and no bytes

    What happens: The model was built on the meta device and not everything was given memory before values were
    loaded. `torch.distributed.checkpoint.load` into a model on meta succeeds without a word and loads nothing;
    `load_state_dict` without `assign=True` copies into nothing; a name that the checkpoint lacks, above all a
    non-persistent buffer, stays behind. The first forward or the first optimizer step raises.

    How to see it: The device is `meta` after loading ended.

    Remedy: Give memory first, then load: `model.to_empty(device="cpu")` under an offload policy, else the
    accelerator; then load with `assign=False`, and compute buffers again that no checkpoint holds.

    Call: model.to_empty(device="cpu")

    Seen in: pytorch #164554 #132721 #104026

    Detected by: facts, when a phase has ended, or when one begins that uses the values.

    Severity: later; now at the first forward.
    """
    uses = ("train", "eval", "save", "export", "")  # a phase of another name may be the one that gives it memory
    return it.home == "meta" and it.world.about_to in uses
