"""A live model, or an exception, looked at by the same rules as a trace.

`inspect` reads a model once; `explain` finds the model behind an exception first. Both go through `capture`, so a
live look and a trace cannot differ. Nothing is moved, nothing is kept, no tensor is printed, and an object that
cannot be looked at is passed over.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from diagkit import torch_internals as internals
from diagkit.capture import snapshot
from diagkit.capture.failures import failure_of
from diagkit.diagnosis.diagnose import diagnose
from diagkit.diagnosis.explain import Explanation, by_facts, by_text
from diagkit.diagnosis.finding import Findings
from diagkit.diagnosis.operation import operation_of
from diagkit.diagnosis.predictions import Prediction, facets, measure, predict
from diagkit.diagnosis.predictions.facets import Facets
from diagkit.diagnosis.signatures import said
from diagkit.errors import UsageError
from diagkit.torch_internals.parts import unreadable
from diagkit.trace import RankTrace
from diagkit.trace.schema import TENSOR_KINDS, Failure
from diagkit.trace.table import ResidencyTable

#: Values looked at in one frame, members of one container, and objects in all.
_PER_FRAME, _PER_CONTAINER, _IN_ALL = 400, 64, 20_000


@dataclass(frozen=True)
class Inspection:
    """What a live model shows now. ``trace`` is the snapshot that everything else was read from."""

    trace: RankTrace
    findings: Findings
    state: Facets
    prediction: Prediction | None

    @property
    def table(self) -> ResidencyTable:
        """Where every tensor is, equal ones together."""
        return ResidencyTable.at(self.trace, kinds=TENSOR_KINDS)

    def probe(self, timeout: float = 300) -> Prediction:
        """The prediction, measured anew on the torch that is installed here, in processes of their own.

        It uses the simulated accelerator and touches neither this process nor the model; ``timeout`` is in seconds.

        Raises:
            UsageError: nothing like this state is known.
            SimulatorError: the measurement did not come to an end.
        """
        return measure(self.state, timeout)

    @property
    def notes(self) -> tuple[str, ...]:
        return self.findings.notes

    def __repr__(self) -> str:
        lines = [repr(self.table), "", repr(self.findings)]
        if self.prediction is not None:
            lines += ["", _measured(self.prediction)]
            lines += [f"  {operation:<26} {cell.text}" for operation, cell in self.prediction.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        parts = [self.table._repr_html_(), self.findings._repr_html_()]
        if self.prediction is not None:
            rows = "".join(
                f"<tr><td style='text-align:left'>{html.escape(op)}</td>"
                f"<td style='text-align:left'>{html.escape(cell.text)}</td></tr>"
                for op, cell in self.prediction.items()
            )
            head = html.escape(_measured(self.prediction))
            parts.append(f"<details open><summary>{head}</summary><table>{rows}</table></details>")
        return f"<div class='diagkit-inspection'>{''.join(parts)}</div>"


def _measured(prediction: Prediction) -> str:
    return (
        f"what each next operation does ({prediction.label or f'from a table measured on torch {prediction.torch}'}):"
    )


def inspect(model: object, optimizer: Any = None) -> Inspection:
    """Looks at a model, several by name, or an engine that has one; moves nothing.

    ``optimizer`` is one optimizer or several; an engine's own are found. The result prints a residency table, findings,
    and what each next operation will do.

    Raises:
        UsageError: there is no module in what was given.

    Example::

        dk.inspect(model, optimizer)
        dk.inspect(engine).findings.codes
    """
    engine: object | None = None
    models: nn.Module | Mapping[str, nn.Module]
    if isinstance(model, nn.Module) or (isinstance(model, Mapping) and model):
        models = model
    else:
        engine = model
        found = _module_of(model)
        if found is None:
            raise UsageError(
                "nothing to inspect",
                found=type(model).__name__,
                expected="a module, or an engine that holds one",
                remedy="Pass the model itself",
            )
        models = found
        optimizer = optimizer if optimizer is not None else _optimizers_of(model)
    trace = snapshot(models, optimizer, engine)
    state = facets(trace)
    findings = diagnose(trace)
    roots = [models] if isinstance(models, nn.Module) else models.values()
    findings.problems = (*(part for root in roots for part in unreadable(root)), *findings.problems)
    return Inspection(trace, findings, state, predict(state, trace.header.torch))


def _module_of(engine: object) -> nn.Module | None:
    """The module that an engine holds; one with FSDP2 in it goes before others."""
    held = [value for value in _members(engine) if isinstance(value, nn.Module)]
    return next((m for m in held if internals.has_fsdp(m)), held[0] if held else None)


def _optimizers_of(engine: object) -> list[torch.optim.Optimizer]:
    return [value for value in _members(engine) if isinstance(value, torch.optim.Optimizer)]


def _members(thing: object) -> list[object]:
    try:
        return list(vars(thing).values())
    except Exception:
        return []


# ---- exceptions


def explain(exc: BaseException | None = None) -> Explanation:
    """What an exception means: the hazard behind it, or plainly that there is none.

    Without an argument it is the one being handled, or the last one that nobody handled (a notebook's). Of a group the
    first exception with a known text is meant. Model, optimizer and engine are found in the frames that it passed
    through.

    Raises:
        UsageError: there is no exception, or what was given is none.

    Example::

        try:
            engine.save_checkpoint(path)
        except RuntimeError:
            print(dk.explain())
    """
    outer = exc
    if outer is None:
        outer = sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if outer is None:
        raise UsageError("no exception to explain", remedy="Call it in the except block, or pass the exception")
    if not isinstance(outer, BaseException):
        raise UsageError(
            "no exception to explain",
            found=type(outer).__name__,
            expected="an exception",
            remedy="Pass the exception; diagkit explain reads a log",
        )
    error = _speaker(outer)
    chain = _chain(error)
    frames = list(_frames(chain if error is outer else [*chain, *_chain(outer)]))
    operation = operation_of((f.f_code.co_filename, f.f_code.co_name) for f in _frames(chain[:1]))
    failure = failure_of(error, operation)
    first = chain[-1]
    earlier = (
        Failure(type(first).__name__, _message(first), "") if first is not error and said(_message(first)) else None
    )
    names = said(failure.message) | (said(earlier.message) if earlier else frozenset())
    if names == {"no_backend"} and not _through_dtensor(chain):
        names = frozenset()  # somebody's own collective on somebody's own tensor
    findings: Findings | tuple[()] = ()
    blamed = failure if said(failure.message) or earlier is None else earlier
    if names:
        found = _Found()
        found.search(frames)
        trace = found.snapshot()
        if trace is not None:
            findings = diagnose(trace, blamed)
    before = earlier if blamed is failure else None
    if isinstance(findings, Findings) and findings.blind:  # there may be facts that speak for it, only nobody saw them
        told = by_text(blamed, operation, where=_where(error), earlier=before)
        return replace(told, notes=(f"nothing could be looked at: {findings.blind}",), simulated=findings.simulated)
    return by_facts(blamed, findings, operation, earlier=before, where=_where(error))


def _through_dtensor(chain: Iterable[BaseException]) -> bool:
    parts = (
        "/torch/distributed/tensor/",
        "/torch/distributed/_functional_collectives",
        "/torch/distributed/checkpoint/",
    )
    return any(part in f.f_code.co_filename.replace("\\", "/") for f in _frames(chain) for part in parts)


def _chain(error: BaseException) -> list[BaseException]:
    """The exception and what it was raised from or on top of, newest first."""
    found = [error]
    while len(found) < 20:
        last = found[-1]
        before = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if before is None or before in found:
            break
        found.append(_speaker(before))
    return found


def _speaker(error: BaseException) -> BaseException:
    """Of an exception group, at any depth, the first exception with a known text; else the exception itself."""
    waiting, seen = [error], 0
    while waiting and seen < 1000:
        one = waiting.pop(0)
        seen += 1
        inner = getattr(one, "exceptions", None)  # Python 3.10 knows no groups, but a package brings them
        if isinstance(inner, tuple) and inner and all(isinstance(e, BaseException) for e in inner):
            waiting[:0] = inner
        elif one is not error and said(_message(one)):
            return one
    return error


def _frames(chain: Iterable[BaseException]) -> Iterator[Any]:
    for error in chain:
        traceback: TracebackType | None = error.__traceback__
        while traceback is not None:
            yield traceback.tb_frame
            traceback = traceback.tb_next


def _message(error: BaseException) -> str:
    try:
        return str(error)[:4000]
    except Exception:
        return ""


def _where(error: BaseException) -> str:
    from diagkit.capture.cause import from_traceback

    frame = from_traceback("", error.__traceback__).frame
    return str(frame) if frame else ""


class _Found:
    """Modules, optimizers and engines met in frames."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.engines: dict[int, object] = {}
        self.tensors: set[int] = set()
        self._seen: set[int] = set()

    def search(self, frames: Iterable[Any]) -> None:
        for frame in frames:
            try:
                values = list(frame.f_locals.values())[:_PER_FRAME]
            except Exception:
                continue
            for value in values:
                self._take(value, depth=0)

    def _take(self, value: object, depth: int) -> None:
        if id(value) in self._seen or len(self._seen) > _IN_ALL:
            return
        self._seen.add(id(value))
        try:
            self._sort(value, depth)
        except Exception:  # a proxy, a property that raises: nothing that we must know
            return

    def _sort(self, value: object, depth: int) -> None:
        if isinstance(value, nn.Module):
            self.modules[id(value)] = value
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizers[id(value)] = value
        elif isinstance(value, torch.Tensor):
            self.tensors.add(id(value))
        elif isinstance(value, (str, bytes, int, float, type(None), type)):
            return
        elif isinstance(value, (dict, list, tuple, set)) and depth < 2:
            members = value.values() if isinstance(value, dict) else value
            for _, member in zip(range(_PER_CONTAINER), members, strict=False):
                self._take(member, depth + 1)
        elif (owner := getattr(value, "__self__", None)) is not None and depth < 3:  # a bound method
            self._take(owner, depth + 1)
        elif depth < 2 and not callable(value):
            held = _members(value)[:_PER_CONTAINER]
            if any(isinstance(member, nn.Module) for member in held):
                self.engines[id(value)] = value
                for member in held:
                    if isinstance(member, (nn.Module, torch.optim.Optimizer)):
                        self._take(member, depth + 1)

    def snapshot(self) -> RankTrace | None:
        """A look at the FSDP2 models that were met, or at all of the process where none was."""
        roots = _roots(m for m in self.modules.values() if internals.has_fsdp(m))
        everything = internals.all_fsdp_modules()
        if roots:  # a layer alone says nothing of the root that it belongs to
            met = {id(m) for m in roots}
            roots = _roots([*roots, *(m for m in everything if any(id(child) in met for child in m.modules()))])
        else:  # tensors know no module, but a module knows its tensors
            roots = _roots(everything)
            roots = [m for m in roots if any(id(p) in self.tensors for p in m.parameters())] or roots
        if not roots:
            return None
        engine = next((e for e in self.engines.values() if _module_of(e) in roots), None)
        optimizers = [*self.optimizers.values(), *(_optimizers_of(engine) if engine is not None else ())]
        if not optimizers:
            optimizers = _live_optimizers(roots)
        models = roots[0] if len(roots) == 1 else {f"model{n}" if n else "model": m for n, m in enumerate(roots)}
        return snapshot(models, list({id(o): o for o in optimizers}.values()), engine)


def _live_optimizers(roots: Iterable[nn.Module]) -> list[torch.optim.Optimizer]:
    """Optimizers of this process that train a parameter of these modules."""
    import gc

    trained = {id(p) for root in roots for p in root.parameters()}
    return [
        o
        for o in gc.get_objects()
        if issubclass(type(o), torch.optim.Optimizer)
        and any(id(p) in trained for group in o.param_groups for p in group["params"])
    ]


def _roots(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that no other one of them contains."""
    found = {id(m): m for m in modules}
    inner = {id(child) for m in found.values() for _, child in internals.named_modules(m) if child is not m}
    return [m for key, m in found.items() if key not in inner]
