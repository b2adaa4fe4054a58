"""What each tool says of five models: healthy, split by a move, split by hand, wholly moved, aborted in backward.

Every tool is asked the way its users ask it, in a process of its own for each model, on one rank of the simulated
accelerator. Its answer is brought down to the devices that it names for the parameters, and that is held against the
truth, which the benchmark made itself. Nobody is asked for more than it offers: a tool that names no device says
"nothing", and one that dies is quoted.

Run: ``python tests/benchmarks/visibility.py [--json FILE]``
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from worlds import one_rank, stack

WIDTH = 8

# ---- the models, each with what is true of its parameters


def healthy(model: nn.Module) -> None:
    pass


def split(model: nn.Module) -> None:
    model.to("npu")


def split_by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter._local_tensor = parameter._local_tensor.to("npu")  # type: ignore[attr-defined]


def wholly_moved(model: nn.Module) -> None:
    for child in model.modules():
        if isinstance(child, nn.Linear):
            child.to("npu")


def aborted_backward(model: nn.Module) -> None:
    def stop(gradient: torch.Tensor) -> None:
        raise ValueError("somebody's own error, half way through backward")

    def watch(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        output.register_hook(stop)

    handle = model.get_submodule("0").register_forward_hook(watch)
    with contextlib.suppress(ValueError):
        model(torch.randn(2, WIDTH, device="npu")).sum().backward()
    handle.remove()


@dataclass(frozen=True)
class Model:
    """What is done to a healthy model, and where its parameters are then: metadata device, storage device."""

    make: Callable[[nn.Module], None]
    metadata: str
    storage: str

    @property
    def truth(self) -> set[str]:
        return {self.metadata, self.storage}


MODELS = {
    "healthy": Model(healthy, "cpu", "cpu"),
    "split": Model(split, "npu:0", "cpu"),
    "split by hand": Model(split_by_hand, "cpu", "npu:0"),
    "wholly moved": Model(wholly_moved, "npu:0", "npu:0"),
    "aborted backward": Model(aborted_backward, "cpu", "cpu"),
}

# ---- the tools: each looks at a model and answers in text; what it says of devices is read out of that


def first(model: nn.Module) -> torch.Tensor:
    return next(model.parameters())


def param_device(model: nn.Module, optimizer: Optimizer) -> str:
    return str({str(p.device) for p in model.parameters()})


def untyped_storage(model: nn.Module, optimizer: Optimizer) -> str:
    return str({str(p.untyped_storage().device) for p in model.parameters()})


def printed(model: nn.Module, optimizer: Optimizer) -> str:
    text = repr(first(model)).partition("device_mesh=")[0]
    return text if "device=" in text else f"{text} device='cpu'"  # torch leaves "cpu" out


def printed_model(model: nn.Module, optimizer: Optimizer) -> str:
    return repr(model)


def sharding_picture(model: nn.Module, optimizer: Optimizer) -> str:
    from torch.distributed.tensor.debug import visualize_sharding

    return str(visualize_sharding(first(model), use_rich=True))


def memory_counters(model: nn.Module, optimizer: Optimizer) -> str:
    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    held = torch.npu.memory_allocated()  # type: ignore[attr-defined]
    return f"{held} of {needed} bytes: {'npu:0' if held >= needed else 'cpu'}"


def mem_tracker(model: nn.Module, optimizer: Optimizer) -> str:
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    return _holders(tracker, "Parameter")


def fsdp_mem_tracker(model: nn.Module, optimizer: Optimizer) -> str:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    return _holders(FSDPMemTracker(model, optimizer), "Sharded Param")


def _holders(tracker: object, wanted: str) -> str:
    """The devices on which a tracker counts parameters."""
    with tracker:  # type: ignore[attr-defined]
        pass
    found = []
    for device, counts in tracker.get_tracker_snapshot("current").items():  # type: ignore[attr-defined]
        held = sum(count for kind, count in counts.items() if wanted in str(getattr(kind, "value", kind)))
        found += [f"{wanted} {held} B on {device}"] if held else []
    return "; ".join(found)


def comm_debug_mode(model: nn.Module, optimizer: Optimizer) -> str:
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as mode:
        first(model).clone()
    return str(mode.generate_comm_debug_tracing_table(noise_level=3))


def debug_mode(model: nn.Module, optimizer: Optimizer) -> str:
    from torch.utils._debug_mode import DebugMode

    with DebugMode(record_tensor_attributes=["device"]) as mode:
        first(model).clone()
    return str(mode.debug_string())


def profiler(model: nn.Module, optimizer: Optimizer) -> str:
    with torch.profiler.profile(profile_memory=True, record_shapes=True) as run:
        first(model).clone()
    return "; ".join(sorted({f"{event.key} {event.device_type}" for event in run.key_averages()}))


def diagkit(model: nn.Module, optimizer: Optimizer) -> str:
    import diagkit

    seen = diagkit.inspect(model, optimizer)
    parameters = [facts for facts in seen.trace.facts if getattr(facts, "aliased", None) is not None]
    rows = {(facts.metadata_device, facts.storage_device) for facts in parameters}
    return f"{rows} {', '.join(seen.findings.codes)}"


TOOLS: dict[str, Callable[[nn.Module, Optimizer], str]] = {
    "param.device": param_device,
    "param.untyped_storage().device": untyped_storage,
    "print(param)": printed,
    "print(model)": printed_model,
    "visualize_sharding": sharding_picture,
    "npu.memory_allocated": memory_counters,
    "MemTracker": mem_tracker,
    "FSDPMemTracker": fsdp_mem_tracker,
    "CommDebugMode": comm_debug_mode,
    "DebugMode, device attributes": debug_mode,
    "torch.profiler": profiler,
    "diagkit.inspect": diagkit,
}


def ask(tool: str, model_name: str) -> str:
    """What the tool says, or the exception that it dies of."""
    with one_rank():
        torch.manual_seed(0)
        model = stack(8, WIDTH)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, WIDTH, device="npu")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        MODELS[model_name].make(model)
        printed_aside = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed_aside):
                answer = TOOLS[tool](model, optimizer)
        except Exception as error:
            return f"crash: {type(error).__name__}: {error}".splitlines()[0]
    return printed_aside.getvalue() + answer


def devices(answer: str) -> set[str]:
    """The devices that an answer names."""
    return set(re.findall(r"\bnpu:0\b|\bcpu\b", answer))


def verdict(model_name: str, answer: str, of_healthy: str) -> str:
    """One word, with what was said: "right", "half" (one of two truths), "wrong", "nothing", "crash"."""
    truth, said = MODELS[model_name].truth, devices(answer)
    if answer.startswith("crash"):
        return "crash"
    if model_name == "aborted backward":
        return "blind" if answer == of_healthy else "DK604" if "DK604" in answer else "differs"
    if not said:
        return "nothing"
    word = "right" if said == truth else "half" if said < truth else "wrong"
    return f"{word}: {' and '.join(sorted(said, reverse=True))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every answer and verdict there")
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=list(TOOLS))
    parser.add_argument("--ask", nargs=2, metavar=("TOOL", "MODEL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask:
        print(json.dumps(ask(*args.ask)))
        return
    table: dict[str, dict[str, dict[str, str]]] = {}
    print(f"{'':32}" + "".join(f"{name:>22}" for name in MODELS))
    for tool in args.tools:
        answers = {}
        for name in MODELS:
            done = subprocess.run([sys.executable, __file__, "--ask", tool, name], capture_output=True, text=True)
            last = (done.stdout.splitlines() or [""])[-1]
            crashed = f"crash: {(done.stderr.splitlines() or ['no word'])[-1]}"
            answers[name] = json.loads(last) if done.returncode == 0 and last else crashed
        table[tool] = {
            name: {"verdict": verdict(name, answer, answers["healthy"]), "answer": answer[:2000]}
            for name, answer in answers.items()
        }
        print(f"{tool:32}" + "".join(f"{cell['verdict']:>22}" for cell in table[tool].values()), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "tools": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
