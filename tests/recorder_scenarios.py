"""Ways to move a model, each recorded into a folder of its name. Run on every rank; the tests read the traces.

A comment ``here: NAME`` stands on the line that each trace must name as the culprit.
"""

from __future__ import annotations

import contextlib
import gc
import json
import linecache
import pathlib
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from recorder_far_away import FSDPEngine
from recorder_world import begin, device, end, sharded, train_step
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.multiprocessing.reductions import StorageWeakRef

import diagkit as dk
from diagkit import torch_internals as internals
from diagkit.capture import Recorder, start
from diagkit.lab.models import DecoderConfig, TinyDecoder

Scenario = Callable[[nn.Module, Recorder], object]
SCENARIOS: dict[str, Scenario] = {}


def scenario(body: Scenario) -> Scenario:
    SCENARIOS[body.__name__] = body
    return body


@scenario
def direct(model: nn.Module, rec: Recorder) -> None:
    with rec.phase("save"):
        model.to("npu")  # here: direct


@scenario
def far_away(model: nn.Module, rec: Recorder) -> None:
    engine = FSDPEngine(model, guarded=False)
    with rec.phase("save"):
        engine.save_checkpoint()


@scenario
def guarded(model: nn.Module, rec: Recorder) -> None:
    engine = FSDPEngine(model, guarded=True)
    with rec.phase("save"):
        engine.save_checkpoint()


@scenario
def outside_any_phase(model: nn.Module, rec: Recorder) -> None:
    model.to("npu")  # here: outside_any_phase


@scenario
def sharded_child(model: nn.Module, rec: Recorder) -> None:
    with rec.phase("save"):
        model.model.layers[0].to("npu")  # here: sharded_child


@scenario
def plain_child(model: nn.Module, rec: Recorder) -> None:
    with rec.phase("save"):
        model.model.layers[0].self_attn.to("npu")  # here: plain_child


@scenario
def wrapper(model: nn.Module, rec: Recorder) -> None:
    around = nn.Sequential(nn.Sequential(model), nn.Linear(2, 2))
    with rec.phase("save"):
        around.to("npu")  # here: wrapper


@scenario
def thread(model: nn.Module, rec: Recorder) -> None:
    there = device()  # a thread starts with a current device of its own, number 0

    def mover() -> None:
        model.to(there)  # here: thread

    with rec.phase("save"):
        worker = threading.Thread(target=mover)
        worker.start()
        worker.join()


CELL = """
def move(model):
    model.to("npu")

move(model)
"""
CELL_NAME = "<ipython-input-7-0123456789ab>"


@scenario
def cell(model: nn.Module, rec: Recorder) -> None:
    linecache.cache[CELL_NAME] = (len(CELL), None, CELL.splitlines(True), CELL_NAME)
    code = compile(CELL, CELL_NAME, "exec")
    with rec.phase("save"):
        exec(code, {"model": model})


@scenario
def stack(model: nn.Module, rec: Recorder) -> None:
    def deeper() -> None:
        model.to("npu")  # here: stack

    with contextlib.ExitStack() as phases:
        phases.enter_context(rec.phase("save"))
        deeper()


@scenario
def npu_method(model: nn.Module, rec: Recorder) -> None:
    with rec.phase("move"):
        model.npu()  # here: npu_method


@scenario
def to_empty(model: nn.Module, rec: Recorder) -> None:
    with rec.phase("move"):
        model.to_empty(device="cpu")  # here: to_empty


@scenario
def half(model: nn.Module, rec: Recorder) -> None:
    with rec.phase("move"):
        model.half()  # here: half


@scenario
def there_and_back(model: nn.Module, rec: Recorder) -> None:
    with rec.phase("move"):
        model.to("npu")  # here: there_and_back (there)
    with rec.phase("move"):
        model.cpu()  # here: there_and_back (back)


@scenario
def cuda(model: nn.Module, rec: Recorder) -> str:
    with rec.phase("move"):
        try:
            model.cuda()  # here: cuda
        except (AssertionError, RuntimeError) as error:  # no CUDA in this torch, or no driver
            return f"{type(error).__name__}: {error}"
    return "nothing"


@scenario
def fails_afterwards(model: nn.Module, rec: Recorder) -> list[str]:
    told = []
    try:
        with rec.phase("outer"), rec.phase("save"):
            model.to("npu")
            get_model_state_dict(model)  # here: fails_afterwards
    except RuntimeError as error:
        told.append(str(error))
        told += [frame.name for frame in traceback.extract_tb(error.__traceback__)][:1]
    return told


@scenario
def retries(model: nn.Module, rec: Recorder) -> int:
    """Three exceptions, freed one after the other, so that their addresses are used again; the last one leaves."""
    model.to("npu")
    try:
        with rec.phase("save"):
            for attempt in range(3):
                try:
                    model.state_dict()
                except RuntimeError:
                    if attempt == 2:
                        raise ValueError(f"gave up after {attempt + 1}") from None
    except ValueError:
        return 3
    return 0


@scenario
def interrupted(model: nn.Module, rec: Recorder) -> str:
    try:
        with rec.phase("save"):
            model.to("npu")
            raise KeyboardInterrupt("by hand")
    except KeyboardInterrupt as error:
        return str(error)
    return "nothing"


@scenario
def load_hook(model: nn.Module, rec: Recorder) -> None:
    def move(module: nn.Module, keys: object) -> None:
        module.to("npu")  # here: load_hook

    states = model.state_dict()
    model.register_load_state_dict_post_hook(move)
    with rec.phase("load"):
        model.load_state_dict(states)


@scenario
def save_hook(model: nn.Module, rec: Recorder) -> str:
    def move(module: nn.Module, *rest: object) -> None:
        module.to("npu")  # here: save_hook

    model.register_state_dict_pre_hook(move)
    with rec.phase("save"):
        try:
            get_model_state_dict(model)
        except RuntimeError as error:
            return str(error)
    return "nothing"


@scenario
def by_buffer(model: nn.Module, rec: Recorder) -> None:
    with rec.phase("move"):
        model.model.rotary_emb.to("cpu")  # here: by_buffer


@scenario
def saved_in_background(model: nn.Module, rec: Recorder) -> None:
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        dist.broadcast_object_list(names)
        with rec.phase("save"):
            states = get_model_state_dict(model)
            dcp.async_save({"model": states}, checkpoint_id=names[0]).result()
            model.model.rotary_emb.to("cpu")
        dist.barrier()


def two_models(folder: pathlib.Path) -> None:
    """Two models of one class, told apart by their labels; the actor's optimizer is the recorded one."""
    actor, ref, critic = sharded(seed=1), sharded(seed=2), sharded(seed=3)
    optimizer, other = torch.optim.SGD(actor.parameters()), torch.optim.SGD(critic.parameters())
    with dk.record({"actor": actor, "ref": ref}, optimizer, out=folder / "two_models") as rec, rec.phase("save"):
        ref.to("npu")  # here: two_models (ref)
        actor.model.layers[1].to("npu")  # here: two_models (actor)
        critic.to("npu")  # nobody watches it
        other.state_dict()
        optimizer.state_dict()


def recorders_at_once(folder: pathlib.Path) -> None:
    """Two recorders of one model, one of a layer of it, one of another model; and one inside another."""
    one, two = sharded(seed=1), sharded(seed=2)
    with (
        dk.record(one, out=folder / "at_once_first") as first,
        dk.record(one, out=folder / "at_once_second") as second,
        dk.record(one.model.layers[0], out=folder / "at_once_layer"),
        dk.record(two, out=folder / "at_once_other"),
        first.phase("a"),
        second.phase("b"),
    ):
        one.to("npu")  # here: recorders_at_once
    with dk.record(two, out=folder / "again") as rec, rec.phase("c"):
        two.to("npu")  # here: recorders_at_once (again)


def changed_models(folder: pathlib.Path) -> dict[str, object]:
    """What becomes of a model while it is recorded: sharded, adapted, cut."""
    torch.manual_seed(0)
    told: dict[str, object] = {}
    model = TinyDecoder(DecoderConfig())
    with dk.record(model, out=folder / "sharded_later") as rec:
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        with rec.phase("init"):
            for layer in model.model.layers:
                fully_shard(layer, offload_policy=CPUOffloadPolicy())
            fully_shard(model, offload_policy=CPUOffloadPolicy())
            model.model.rotary_emb.to(device())
        with rec.phase("train"):
            model(torch.zeros(1, 3, dtype=torch.int64, device=device())).sum().backward()
        with rec.phase("save"):
            model.to("npu")  # here: sharded_later

    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with dk.record(plain, out=folder / "adapted") as rec:
        with rec.phase("adapt"):
            adapter = nn.Linear(4, 2, bias=False)
            plain[1].add_module("lora_A", adapter)
            adapter.to("npu")  # here: adapted
            plain.register_buffer("scale", torch.ones(1))
        with rec.phase("cut"):
            first = plain[0]
            del plain[0]
            plain.append(nn.Linear(4, 3))
        told["kept"] = tuple(first.weight.shape)
    return told


def gone(folder: pathlib.Path) -> dict[str, list[bool]]:
    """Whether model, FSDP2's records, a parameter's bytes and optimizer are gone once the job lets go of them: in a
    bare run, while it is recorded, and afterwards."""
    told: dict[str, list[bool]] = {}
    for way in ("bare", "during", "after"):
        model = sharded(seed=4)
        optimizer = torch.optim.AdamW(model.parameters())
        recorder = None if way == "bare" else start(model, optimizer, out=folder / f"gone_{way}", detail="full")
        with recorder.phase("train") if recorder else contextlib.nullcontext():
            train_step(model, optimizer)
            get_model_state_dict(model)
        model.to("npu")
        model.cpu()
        if recorder and way == "after":
            recorder.close()
        [group] = internals.state_groups(model._get_fsdp_state())
        parameter = group.fsdp_params[0]
        storage = parameter.sharded_param._local_tensor.untyped_storage()
        refs = [weakref.ref(thing) for thing in (model, group, parameter, parameter.sharded_param, optimizer)]
        storage_ref = StorageWeakRef(storage)
        del model, optimizer, group, parameter, storage
        gc.collect()
        told[way] = [*(ref() is None for ref in refs), storage_ref.expired()]
        if recorder:
            recorder.close()
    return told


def main(folder_name: str) -> None:
    begin()
    folder = pathlib.Path(folder_name)
    told: dict[str, object] = {"gone": gone(folder)}
    for name, body in SCENARIOS.items():
        model = sharded()
        with dk.record(model, out=folder / name) as rec:
            told[name] = body(model, rec)
    two_models(folder)
    recorders_at_once(folder)
    told["changed"] = changed_models(folder)
    end()
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
