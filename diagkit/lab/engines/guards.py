"""Every condition that the history of the fix added, by name, and which revision of the engines has which.

Rules of this module: one :class:`Guard` is one condition in the engines' code, asked in exactly one place as
``self.has(GUARD)``; nothing else in the engines depends on the revision. So a lesson can take a single guard away
(:meth:`Revision.without`) and see which operations break, and a test does so for all of them.

The pull requests are verl's: #6463 (FSDP export), #6604 (FSDP save), #7005 (FSDP export stays in place), #7103
(VeOmni save, load, export); ``current`` adds the per-tensor staging of VeOmni's export.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diagkit.errors import UsageError

__all__ = ["GUARDS", "REVISIONS", "Guard", "Revision", "revision"]

REVISIONS: tuple[str, ...] = ("before", "#6463", "#6604", "#7005", "#7103", "current")
"""Oldest first. ``before`` is the code of the bug report (verl #5995)."""


@dataclass(frozen=True)
class Guard:
    """One condition: its name, the engine it is in, the first revision that has it, and what it says."""

    name: str
    engine: str
    since: str
    says: str

    def __str__(self) -> str:
        return self.name


FSDP_POLICY_CLEARS_FLAGS = Guard(
    "fsdp.policy-clears-offload-flags",
    "fsdp",
    "before",
    "under the policy, param_offload and optimizer_offload are off",
)
FSDP_POLICY_SETS_FLAG = Guard(
    "fsdp.policy-sets-flag", "fsdp", "#6463", "under the policy, the engine remembers that FSDP owns the device"
)
FSDP_FLAG_STARTS_FALSE = Guard(
    "fsdp.flag-starts-false", "fsdp", "#6463", "an engine without the policy has the flag, False"
)
FSDP_EXPORT_ASKS_FLAG = Guard(
    "fsdp.export-asks-flag", "fsdp", "#6463", "export does not move the model when the flag is set"
)
FSDP_SAVE_ASKS_FLAG = Guard("fsdp.save-asks-flag", "fsdp", "#6604", "save does not move the model when the flag is set")
FLAG_HAS_DEFAULT = Guard(
    "flag-has-default", "fsdp", "#6604", "an engine without the flag counts as one whose flag is False"
)
FSDP_EXPORT_IN_PLACE = Guard(
    "fsdp.export-in-place", "fsdp", "#7005", "export does not move a model without LoRA, policy or not"
)
FSDP_EXPORT_LEAVES_IN_PLACE = Guard(
    "fsdp.export-leaves-in-place", "fsdp", "#7005", "nor does it offload a model without LoRA afterwards"
)
VEOMNI_POLICY_SETS_FLAG = Guard(
    "veomni.policy-sets-flag", "veomni", "#7103", "under the policy, the engine remembers that FSDP owns the device"
)
VEOMNI_SAVE_ASKS_FLAG = Guard(
    "veomni.save-asks-flag", "veomni", "#7103", "save does not move the model when the flag is set"
)
VEOMNI_LOAD_ASKS_FLAG = Guard(
    "veomni.load-asks-flag", "veomni", "#7103", "load does not move the model when the flag is set"
)
VEOMNI_EXPORT_ASKS_FLAG = Guard(
    "veomni.export-asks-flag", "veomni", "#7103", "export does not move the model when the flag is set"
)
VEOMNI_EXPORT_STAGES = Guard(
    "veomni.export-stages-each-tensor", "veomni", "current", "export moves each tensor to the device before it gathers"
)

GUARDS: tuple[Guard, ...] = (
    FSDP_POLICY_CLEARS_FLAGS,
    FSDP_FLAG_STARTS_FALSE,
    FSDP_POLICY_SETS_FLAG,
    FSDP_EXPORT_ASKS_FLAG,
    FSDP_SAVE_ASKS_FLAG,
    FLAG_HAS_DEFAULT,
    FSDP_EXPORT_IN_PLACE,
    FSDP_EXPORT_LEAVES_IN_PLACE,
    VEOMNI_POLICY_SETS_FLAG,
    VEOMNI_SAVE_ASKS_FLAG,
    VEOMNI_LOAD_ASKS_FLAG,
    VEOMNI_EXPORT_ASKS_FLAG,
    VEOMNI_EXPORT_STAGES,
)
"""All of them, oldest first within each engine."""


@dataclass(frozen=True)
class Revision:
    """A state of the engines' code: a name and the guards it has.

    >>> revision("#6604").has(FSDP_SAVE_ASKS_FLAG), revision("#6463").has(FSDP_SAVE_ASKS_FLAG)
    (True, False)
    """

    name: str
    guards: frozenset[Guard] = field(repr=False)

    def has(self, guard: Guard) -> bool:
        """Whether this revision's code contains the condition."""
        return guard in self.guards

    def without(self, *guards: Guard) -> Revision:
        """The same code with conditions taken out: what a careless merge would leave.

        >>> str(revision("current").without(FSDP_SAVE_ASKS_FLAG))
        'current without fsdp.save-asks-flag'
        """
        absent = [guard.name for guard in guards if guard not in self.guards]
        if absent:
            raise UsageError(
                f"revision {self.name} has no guard {', '.join(absent)}",
                expected=", ".join(sorted(guard.name for guard in self.guards)),
                remedy="Take out a guard that is there",
            )
        names = ", ".join(guard.name for guard in guards)
        return Revision(f"{self.name} without {names}", self.guards - set(guards))

    def __str__(self) -> str:
        return self.name


def revision(name: str) -> Revision:
    """The revision of that name.

    Raises:
        UsageError: the name is not one of :data:`REVISIONS`.
    """
    if name not in REVISIONS:
        raise UsageError("unknown revision", found=name, remedy=f"Choose one of {', '.join(REVISIONS)}")
    age = REVISIONS.index(name)
    return Revision(name, frozenset(guard for guard in GUARDS if REVISIONS.index(guard.since) <= age))
