"""The records of a trace: what capture writes, and what diagnosis, views and reports read.

Plain data, standard library only, no torch. Three ideas carry the format:

* **Rows.** Everything watched (parameter, buffer, gradient, optimizer state, exported tensor, FSDP group,
  optimizer, engine) is a
  row, named once in a table that is the same on every rank.
* **Facts.** What is true of a row at one moment is one small frozen record. Equal records are written once and get
  a number;
  number 0 means that the row does not exist at that moment (a gradient that is None, say).
* **Moments.** A moment lists which rows changed to which facts since the moment before, so that its size follows
  what changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from diagkit.language import tr

SCHEMA_VERSION = 1

PARAMETER = "parameter"
BUFFER = "buffer"
GRADIENT = "gradient"
OPTIMIZER_STATE = "optimizer_state"
EXPORT = "export"
GROUP = "fsdp_group"
OPTIMIZER = "optimizer"
ENGINE = "engine"
#: Kinds of row whose facts are a `Residency`.
TENSOR_KINDS = (PARAMETER, BUFFER, GRADIENT, OPTIMIZER_STATE, EXPORT)
KINDS = (*TENSOR_KINDS, GROUP, OPTIMIZER, ENGINE)

#: How much a recorder watches.
DETAILS = ("phases", "transitions", "full")

# The kinds of moment.
ENTER = "enter"  # a phase begins
EXIT = "exit"  # a phase ends (also by an exception; the failure has a moment of its own before it)
CALL = "call"  # an observed call returned
FAILURE = "failure"  # an observed call or a phase raised
MARK = "mark"  # asked for by name
MOMENT_KINDS = (ENTER, EXIT, CALL, FAILURE, MARK)

ABSENT = 0


def device_type(device: str | None) -> str | None:
    """``"npu:0"`` -> ``"npu"``; None stays None."""
    return None if device is None else device.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Residency:
    """Where one tensor lives, by its metadata and by its bytes.

    ``None`` means "does not apply" (``aliased`` of a buffer) or, for ``storage_device``, "not readable", with the
    reason in
    ``unreadable``. Pointers are not part of it: whether a storage was exchanged is the row's storage generation.
    """

    metadata_device: str  # what `param.device` says: "cpu", "npu:0", "meta"
    storage_device: str | None = None  # where the bytes of the innermost local tensor are
    dtype: str = ""  # of the wrapper, without "torch."
    storage_dtype: str = ""  # of the local tensor
    pinned: bool | None = None  # the local tensor's bytes are page-locked
    wrapper: str = "Tensor"  # "DTensor", "Tensor", or the subclass's name
    mesh_device: str | None = None  # device type of the DTensor's mesh
    shape_agrees: bool = True  # the local tensor has the shape that the wrapper's layout promises
    empty: bool = False  # no elements on this rank
    requires_grad: bool = False
    # Only for parameters that FSDP2 manages:
    flat_device: str | None = None  # where the flat padded bytes are that all-gather reads
    flat_pinned: bool | None = None
    aliased: bool | None = None  # flat bytes and local tensor share one storage
    registered: bool | None = None  # the module's slot holds the very parameter that FSDP2 gathers and trains
    sharded_state: str | None = None  # "sharded", "sharded_post_forward", "unsharded"
    roomy: bool = False  # the storage behind the shard is at least twice as large as the shard with its padding
    # Only where it is so:
    # "tie": same storage as an earlier row; "apart": FSDP2 ties it to an earlier row, and its slot holds another;
    # "parameter": an export or gradient on its parameter's storage; "written": such an export whose bytes were written
    # while somebody held it; "stale": such an export that was left behind when its parameter got another storage
    shares: str | None = None
    unwritten: bool = False  # a buffer that was on meta: nothing has been written into the bytes that it got
    digest: str | None = None  # of its values on this rank, where they were asked for
    # Of a copy to the host that did not wait: "under way", or "read early", before anything waited for it.
    arrival: str | None = None
    unreadable: str | None = None

    tag: ClassVar[str] = "tensor"

    @property
    def split(self) -> bool:
        """Metadata device and storage device differ (compared with their index where both have one)."""
        if self.storage_device is None or self.storage_device == self.metadata_device:
            return False
        if ":" in self.storage_device and ":" in self.metadata_device:
            return True
        return device_type(self.storage_device) != device_type(self.metadata_device)

    def short(self) -> str:
        """``"npu:0/cpu pinned"``: metadata device, storage device, pinning."""
        text = f"{self.metadata_device}/{self.storage_device or '?'}"
        return f"{text} pinned" if self.pinned else text


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One FSDP2 parameter group; the row's name is the fully qualified name of its module ("" is the root)."""

    offload: bool = False  # CPUOffloadPolicy
    pin_memory: bool = False
    policy: str = ""  # class of the offload policy
    policy_flags: str = ""  # further fields of the policy, "name=value, ..." (a later torch may add per-phase flags)
    device: str = ""  # where the group computes
    mesh: str = ""  # "npu (2,) fsdp"
    mesh_device: str | None = None
    mesh_size: int = 1
    backends: str = ""  # of the mesh's process group: "cpu:gloo,npu:hccl"; "" when no group is up
    parameters: int = 0
    sharded_state: str | None = None
    training_state: str | None = None  # "idle", "forward", "pre_backward", "post_backward"
    root: bool | None = None  # None: lazy init has not run
    lazy_init: str = "no"  # "no", "done", "unfinished" (root mark set, but a parameter never got its dtypes)
    backward_pending: bool = False  # the root's final backward callback is queued
    backward_running: bool = False  # autograd is running a backward pass at this moment, in any thread
    stale: bool = False  # an optimizer wrote its parameters while they were gathered: passes compute with the old ones
    unreadable: str | None = None

    tag: ClassVar[str] = "group"


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """One optimizer against the watched models; counts are of parameters on this rank."""

    type: str = ""
    parameters: int = 0
    dead: int = 0  # in param_groups, but not a live parameter of any watched model
    missing: int = 0  # live, wants gradients, in no param_group of this optimizer
    orphans: int = 0  # of the dead: as many as have the shape of a sharded parameter that no watched optimizer trains
    fused: bool = False
    foreach: bool | None = None
    capturable: bool = False

    tag: ClassVar[str] = "optimizer"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a training engine believes about offload: its own flags as text ("True", "False", "missing")."""

    type: str = ""
    uses_policy_flag: str = "missing"  # `_uses_fsdp2_cpu_offload_policy`
    reads_policy_flag: bool = False  # some method of its class names that flag
    offload_param: str = "missing"
    offload_optimizer: str = "missing"

    tag: ClassVar[str] = "engine"


Facts = Residency | GroupFacts | OptimizerFacts | EngineFacts
FACT_TYPES: Mapping[str, type[Facts]] = {t.tag: t for t in (Residency, GroupFacts, OptimizerFacts, EngineFacts)}


def facts_to_json(facts: Facts) -> dict[str, Any]:
    """The record as a JSON object: its tag, and every field that is not at its default."""
    out: dict[str, Any] = {"is": facts.tag}
    for f in fields(facts):
        value = getattr(facts, f.name)
        if value != f.default:
            out[f.name] = value
    return out


def facts_from_json(data: Mapping[str, Any]) -> Facts:
    """The record of a JSON object. Unknown fields are dropped, wrongly typed ones raise.

    Raises:
        ValueError: unknown tag, missing field, or a value that is no text, number, truth value or null.
    """
    cls = FACT_TYPES.get(data.get("is", ""))
    if cls is None:
        raise ValueError(f"unknown kind of facts {data.get('is')!r}; expected one of {', '.join(FACT_TYPES)}")
    known: dict[str, Any] = {}
    for f in fields(cls):
        if f.name not in data:
            continue
        value = data[f.name]
        if not isinstance(value, (str, int, bool, type(None))) or not _fits(value, str(f.type)):
            raise ValueError(f"{cls.__name__}.{f.name}: expected {f.type}, found {value!r:.80}")
        known[f.name] = value
    try:
        return cls(**known)
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from None


def _fits(value: object, annotation: str) -> bool:
    allowed = {part.strip() for part in annotation.split("|")}
    name = "None" if value is None else type(value).__name__
    return name in allowed


@dataclass(frozen=True, slots=True)
class Row:
    """One watched thing. ``of`` is the row number of the parameter that a gradient, state or export belongs to."""

    id: int
    kind: str
    model: str  # label of its model, "model" unless several are watched
    name: str  # fully qualified name; for a gradient, state or export that of its parameter
    part: str = ""  # optimizer state: "exp_avg", "step", ...
    shape: tuple[int, ...] | None = None  # global shape
    of: int | None = None

    @property
    def label(self) -> str:
        """``"lm_head.weight"``, ``"lm_head.weight [exp_avg]"``, ``"lm_head.weight [gradient]"``."""
        if self.kind in (PARAMETER, BUFFER):
            return self.name
        return f"{self.name or self.model} [{self.part or self.kind}]"


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of somebody's code."""

    file: str
    line: int
    function: str
    code: str = ""  # the source line, stripped; "" where it could not be read

    @property
    def place(self) -> str:
        """``"engine.py:41"``; of a notebook's cell, whose file has a made-up name, ``"notebook, line 41"``."""
        if self._in_cell:
            return tr("notebook, line {line}", line=self.line)
        return f"{self.file.rpartition('/')[2]}:{self.line}"

    @property
    def _in_cell(self) -> bool:
        return "ipykernel_" in self.file or self.file.startswith("<ipython-input")

    def __str__(self) -> str:
        """``"engine.py:41 save_checkpoint"``; a cell has no name to be found by, so its line itself is told."""
        return f"{self.place}: {self.code or self.function}" if self._in_cell else f"{self.place} {self.function}"


@dataclass(frozen=True, slots=True)
class Cause:
    """Which call did it.

    ``frame`` is the innermost line outside torch and diagkit: the culprit. ``chain`` reads from the operation to
    the torch internals: ``("FSDPEngine.save_checkpoint", "load_model_to_device", "Module.to",
    "FSDPParam.reset_sharded_param")``.
    ``stack`` holds every frame outside torch, outermost first.
    """

    operation: str  # the observed call: "Module._apply", "Module.load_state_dict", ...
    chain: tuple[str, ...] = ()
    frame: Frame | None = None
    stack: tuple[Frame, ...] = ()
    target: str = ""  # what it was called on: "model.layers.0", "AdamW"
    request: str = ""  # what was asked for, where it can be told without touching data: "device=npu:0"

    def __str__(self) -> str:
        where = f"{self.frame}: " if self.frame else ""
        return where + (" -> ".join(self.chain) or self.operation)


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that passed an observed call or a phase."""

    type: str
    message: str
    operation: str  # the observed call or the phase's name
    asks: str = ""  # a line on the way that takes a device from a parameter: "generate.py:12 sample: device = ..."


@dataclass(frozen=True, slots=True)
class Change:
    """Rows ``start .. start + count - 1`` now have ``facts``; ``exchanged`` says that their storage was exchanged."""

    start: int
    count: int
    facts: int
    exchanged: bool = False


@dataclass(slots=True)
class Phase:
    """One engine operation. ``ordinal`` counts phases from 1 in the order they began; 0 is "outside any phase"."""

    ordinal: int
    name: str
    parent: int = 0
    label: str = ""  # the user's own method: "FSDPEngine.save_checkpoint"
    enter: int | None = None  # index of its moments
    exit: int | None = None
    failed: bool = False
    calls: dict[str, int] = field(
        default_factory=dict
    )  # observed calls inside, by name, also those that changed nothing


@dataclass(slots=True)
class Moment:
    """A point in time at which residencies were read. ``time`` is wall clock, ``clock`` monotonic, both in seconds."""

    index: int
    seq: int
    time: float
    clock: float
    phase: int  # ordinal
    kind: str  # one of MOMENT_KINDS
    label: str  # "save: enter", "Module._apply", the mark's name
    changes: tuple[Change, ...] = ()
    cause: Cause | None = None
    failure: Failure | None = None
    key: bool = False  # `changes` is the whole state, not a difference


@dataclass(frozen=True, slots=True)
class Header:
    """Who recorded this file, where, on what."""

    schema: int = SCHEMA_VERSION
    run: str = ""
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    host: str = ""
    pid: int = 0
    torch: str = ""
    python: str = ""
    device: str = "cpu"  # type of the accelerator, "cpu" where there is none
    device_index: int | None = None
    device_name: str = ""
    device_memory: int = 0  # of the accelerator, in MiB; 0 where that is not known
    device_uuid: str = ""  # of the device with that index, "" where it does not say
    visible_devices: str = ""  # which devices the process may see: "4,5", then of which container's, "4,5;0-7"
    simulated: bool = False
    backends: str = ""  # of the default process group
    detail: str = "transitions"
    argv: tuple[str, ...] = ()
    revision: str = ""  # code revision, where known
    job: Mapping[str, Any] = field(default_factory=dict)  # what the caller said about the job
    diagkit: str = ""
