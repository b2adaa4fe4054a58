"""Where the lab's engines differ from verl's on purpose, each with its reason. Nothing else may differ."""

from __future__ import annotations

from realengines.compare import KnownDifference

_RESTING = tuple(
    f"{kind}, {moment}" for kind in ("parameters", "buffers") for moment in ("init", "inside", "end", "failure")
)

KNOWN: tuple[KnownDifference, ...] = (
    KnownDifference(
        engine="fsdp",
        releases=("0.9.1",),
        offloads=("manual",),
        facts=_RESTING,
        real="cpu/cpu pinned",
        lab="cpu/cpu",
        reason=(
            "0.9.1 has verl #7347, which moves whole models with non_blocking=True, and such a copy to the host lands "
            "in pinned memory; the lab's revisions are those of the offload-policy fix and end before it."
        ),
    ),
    KnownDifference(
        engine="fsdp",
        releases=("0.9.1",),
        offloads=("policy", "manual"),
        facts=("exported as",),
        real="float32",
        lab="bfloat16",
        reason="0.9.1 exports in the parameters' own type, earlier releases and the lab cast to bfloat16.",
    ),
)
