"""`heal`: mends a live model without building it again.

It looks as `inspect` does, makes a plan from what it finds, lets the ranks agree on it, and does it; then it looks
again and says what is left. Values stay bit for bit, a parameter stays the object that the optimizer holds, and what
is whole is not touched.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from diagkit import torch_internals as internals
from diagkit.capture import hooks, snapshot
from diagkit.capture.cause import message_of
from diagkit.capture.parts import optimizers_of
from diagkit.diagnosis.diagnose import diagnose
from diagkit.diagnosis.finding import patterns
from diagkit.diagnosis.signatures import said
from diagkit.errors import UsageError
from diagkit.remedy.agreement import agree
from diagkit.remedy.healed import Healing, Step
from diagkit.remedy.look import Look
from diagkit.remedy.mend import Mend
from diagkit.remedy.offloaded import is_engine, models_in
from diagkit.remedy.passes import end_passes, repeat_lazy_init
from diagkit.remedy.places import move_buffers, rehome_gradients, rehome_states, settle_parameters
from diagkit.torch_internals import writers
from diagkit.trace.schema import Failure, Residency, device_type

__all__ = ["heal"]

#: In the order in which it must be done: a pass that an exception ended still holds gathered parameters in the slots,
#: and lazy init can run anew only where parameters are on the CPU again.
_FINDERS = (end_passes, settle_parameters, rehome_gradients, rehome_states, move_buffers, repeat_lazy_init)


def heal(
    model: object,
    optimizer: Any = None,
    dry_run: bool = False,
    *,
    buffers: bool = False,
    alone: bool = False,
    timeout: float = 60.0,
) -> Healing:
    """Mends what a whole-model move or an exception has done to a model under `CPUOffloadPolicy`.

    ``model`` is a module, several (by name or in a list), or an engine, whose optimizers are found by themselves.
    Mended are: parameters that are split, on the accelerator, moved past FSDP2 or no longer pinned (DK101, DK102,
    DK103, DK701); stranded gradients (DK301); optimizer state elsewhere or split (DK302, DK303); buffers left on the
    CPU (DK501); a first forward or a backward pass that an exception ended (DK601, DK604). Anything else is left, with
    the reason. A second call finds nothing to do. ``dry_run`` shows the plan, touches nothing and asks no other rank.

    Buffers on the CPU alone are no fault. They are moved where the exception that is being handled, or that the
    notebook showed last, came out of this model and says that devices differ; or always, with ``buffers=True``.

    All ranks of the model's meshes call it, and go on only when all would mend the same things. They meet in
    the process group's store, in no collective: any backend will do (``hccl`` alone, too), and a rank that does not
    come costs the others ``timeout`` seconds. With ``alone`` a rank asks nobody; so it is, too, without a process
    group or with one rank. Nothing that is done communicates.

    Raises:
        UsageError: there is no model, something else was given for an optimizer, or a pass is running: a forward pass
            of the model or any backward pass, in whatever thread.
        RanksDisagree: a rank did not come, or the plans differ; nothing was touched.

    Example::

        try:
            engine.save_checkpoint(path)
        except RuntimeError:
            print(dk.heal(engine))
            engine.save_checkpoint(path)
    """
    models = models_in(model)
    optimizers = _optimizers(model, optimizer)
    if not models:
        raise UsageError(
            "nothing to heal",
            found=type(model).__name__,
            expected="a module, several, or an engine that holds one",
            remedy="Pass the model itself",
        )
    _refuse_inside_a_pass(models.values())
    hooks.catch_up()  # a recorder may be at work since before this module was imported
    engine = model if is_engine(model) else None
    trace = snapshot(models, optimizers, engine)
    findings = diagnose(trace, _failure(models.values()))
    wanted = {name for f in findings if f.code == "DK501" for name in f.names} | (_on_cpu(trace) if buffers else set())
    look = Look.at(models.values(), optimizers, findings.codes, wanted)
    plan = [mend for find in _FINDERS if (mend := find(look)) is not None]
    notes = [note for mend in plan for note in mend.notes]
    if not optimizers:
        notes.append("no optimizer was given: its state was not looked at")
    if dry_run:
        codes = {code for mend in plan for code in mend.codes}
        steps = [Step(mend.kind, mend.told(), mend.codes, mend.concerned) for mend in plan]
        left = [finding for finding in findings if finding.code not in codes]
        return Healing(tuple(steps), tuple(left), tuple(notes), True, findings.simulated)
    if not alone:
        agree(models.values(), _comparable(plan, look), timeout)
    steps = mend_all(plan)
    after = findings if not plan else diagnose(snapshot(models, optimizers, engine))
    reasons = {code: "it could not be done, see above" for step in steps if step.problems for code in step.codes}
    return Healing(tuple(steps), tuple(after), tuple(notes), False, findings.simulated, reasons)


def _comparable(plan: Sequence[Mend], look: Look) -> dict[str, list[str]]:
    """What every rank must be about to mend, as patterns by kind. What some rank has no part of, it cannot find."""
    partly = {entry.name for entry in look.kept if not writers.on_every_rank(entry.record)}
    found = {
        mend.kind: patterns(sorted(name for name in mend.concerned if name.partition(" [")[0] not in partly))
        for mend in plan
    }
    return {kind: list(names) for kind, names in found.items() if names}


def mend_all(plan: Sequence[Mend]) -> list[Step]:
    """Does what was planned. (A recorder at work observes this very call, so that a trace tells who mended.)

    Outside of a caller's inference mode: a tensor that is made in it can be trained no more.
    """
    with torch.inference_mode(False), torch.no_grad():
        return [_done(mend) for mend in plan]


def _done(mend: Mend) -> Step:
    failed: list[str] = []
    problems: dict[str, None] = {}
    for name, act in mend.acts:
        try:
            act()
        except Exception as error:
            failed.append(name)
            problems[f"{name}: {type(error).__name__}: {message_of(error)}"[:300]] = None
    names = mend.names if len(failed) < len(mend.acts) else ()
    names = names or tuple(name for name, _ in mend.acts if name not in failed)
    return Step(mend.kind, mend.told(len(failed)), mend.codes, names, tuple(problems))


def _optimizers(model: object, optimizer: Any) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return optimizers_of(model) if is_engine(model) else []
    several = optimizer.values() if isinstance(optimizer, Mapping) else optimizer
    given = list(several) if isinstance(several, Iterable) else [optimizer]
    for one in given:
        if not (isinstance(getattr(one, "state", None), Mapping) and hasattr(one, "param_groups")):
            raise UsageError(
                "no optimizer",
                found=type(one).__name__,
                expected="an object with state and param_groups, or several by name or in a row",
                remedy="Pass the optimizer itself, without its scheduler",
            )
    return list({id(one): one for one in given}.values())


def _on_cpu(trace: Any) -> set[str]:
    """Names of the buffers whose bytes are on the CPU."""
    numbers = trace.state(-1).facts
    return {
        row.name
        for row in trace.rows
        if row.kind == "buffer"
        and isinstance(facts := trace.facts[numbers[row.id]], Residency)
        and device_type(facts.storage_device) == "cpu"
    }


def _refuse_inside_a_pass(models: Iterable[nn.Module]) -> None:
    inside = _pass_under_way(_modules(models))
    if inside:
        raise UsageError(
            f"heal was called in the middle of {inside}",
            expected="a model that is at rest",
            remedy="Call it where the exception has left the pass",
        )


def _pass_under_way(ids: set[int]) -> str:
    """The pass of one of these modules that is on the stack of a thread. Autograd does not tell whose backward pass
    another thread is in: any is one too many, because gradients are exchanged in it without Python's lock."""
    if internals.backward_running():
        return "a backward pass"
    if internals.backward_elsewhere():
        return "a backward pass that another thread is in"
    others = sys._current_frames()
    others.pop(threading.get_ident())  # a frame that holds itself would live on
    for where, innermost in (("", sys._getframe(1)), *((" that another thread is in", f) for f in others.values())):
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code is nn.Module._call_impl.__code__ and id(frame.f_locals.get("self")) in ids:
                return f"a forward pass{where}"
            frame = frame.f_back
    return ""


def _failure(models: Iterable[nn.Module]) -> Failure | None:
    """The exception that came out of these models last and says that devices differ: it is what tells a buffer that
    was dragged to the CPU from one that rests there."""
    error = sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None or "same_device" not in said(message := message_of(error)):
        return None
    ids = _modules(models)
    traceback = error.__traceback__
    while traceback is not None:
        if id(traceback.tb_frame.f_locals.get("self")) in ids:
            return Failure(type(error).__name__, message, "")
        traceback = traceback.tb_next
    return None


def _modules(models: Iterable[nn.Module]) -> set[int]:
    return {id(module) for model in models for _, module in internals.named_modules(model)}
