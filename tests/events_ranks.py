"""Hazards that only several ranks, or events between two looks, show: really brought about on forked ranks.

``python events_ranks.py OUT [ONLY]`` writes ``OUT/results.json``; traces are in ``OUT/NAME``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import culprits
import torch
import torch.distributed as dist
from diagnosis_lab import Lab
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import diagkit as dk
from diagkit.demo.predictions.bench import DECODER, Bench, buffers_to, build
from diagkit.demo.predictions.forked import fork_ranks, warm_up
from diagkit.demo.predictions.models import Decoder
from diagkit.lab import simulate

Scenario = Callable[[Lab], None]
SCENARIOS: dict[str, tuple[Scenario, int, str]] = {}


def scenario(ranks: int = 1, group: str = "mixed") -> Callable[[Scenario], Scenario]:
    def enter(function: Scenario) -> Scenario:
        SCENARIOS[function.__name__] = (function, ranks, group)
        return function

    return enter


# ---- ranks that disagree


@scenario(ranks=2)
def dk801(lab: Lab) -> None:
    """One rank alone freezes a layer: it has less to reduce than the other, and their collective breaks down."""
    bench = build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        with rec.phase("train"):
            bench.train()
        with rec.phase("freeze"):
            if lab.rank == 1:
                culprits.freeze(bench.model.get_submodule("head"))
        with rec.phase("train"):
            bench.train()
    lab.answer["trained on"] = True


@scenario(ranks=2)
def dk801_undone(lab: Lab) -> None:
    """The remedy: undone before the next collective."""
    bench, like = build(DECODER, "pinned"), build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        with rec.phase("freeze"):
            if lab.rank == 1:
                culprits.freeze(bench.model.get_submodule("head"))
        seen: list[Any] = [None] * 2
        dist.all_gather_object(seen, [(n, p.requires_grad) for n, p in bench.model.named_parameters()])
        lab.answer["seen"] = [name for name, _ in set(seen[0]) ^ set(seen[1])]
        with rec.phase("remedy"):
            bench.model.requires_grad_(True)
        lab.cured(rec, bench, like)


@scenario(ranks=2)
def dk801_one_rank_moves(lab: Lab) -> None:
    """`if rank == 1: model.to(device)`: state_dict raises there, while the other goes on to the barrier."""
    bench = build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        with rec.phase("train"):
            bench.train()
            bench.optimizer.zero_grad()
        with rec.phase("move"):
            if lab.rank == 1:
                culprits.load_model_to_device(bench.model, "npu")
        try:
            bench.model.state_dict()
            lab.answer["reached the barrier"] = True
        except RuntimeError as error:
            lab.answer["reached the barrier"] = False
            lab.answer["said"] = str(error)


@scenario(ranks=2)
def dk801_only_inside_a_phase(lab: Lab) -> None:
    """Rank 0 alone stages its model for a moment: set aside."""
    bench = build(DECODER, "pinned")
    with lab.recorded(bench) as rec, rec.phase("load"):
        if lab.rank == 0:
            bench.model.to("npu")
            bench.model.to("cpu")
            culprits.buffers_to_device(bench.model, "npu")


# ---- ranks on one device


@scenario(ranks=2)
def dk803(lab: Lab) -> None:
    torch.npu.set_device(0)  # type: ignore[attr-defined]
    bench = build(DECODER, "pinned")
    with lab.recorded(bench) as rec, rec.phase("train"):
        bench.train()
    lab.answer["device"] = bench.model.get_buffer("scale").device.index


@scenario(ranks=2)
def dk803_one_visible_device_each(lab: Lab) -> None:
    """As under Ray: every rank says index 0, and each means another device."""
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = str(lab.rank)
    dk803(lab)


@scenario(ranks=2)
def dk803_set_in_time(lab: Lab) -> None:
    """Recording begins while every rank is still on device 0; the model is wrapped on its own."""
    torch.npu.set_device(0)  # type: ignore[attr-defined]
    with dk.record({}, out=lab.folder) as rec:
        torch.npu.set_device(lab.rank)  # type: ignore[attr-defined]
        bench = build(DECODER, "pinned")
        rec.watch(bench.model, bench.optimizer)
        with rec.phase("train"):
            bench.train()


# ---- what is handed out


def _weights(bench: Bench) -> dict[str, Any]:
    options = StateDictOptions(cpu_offload=True)  # which copies nothing: the parameters are on the CPU
    return get_model_state_dict(bench.model, options=options)


def _values(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.to_local().clone() for name, value in tensors.items() if isinstance(value, DTensor)}


def _changed(held: dict[str, Any], values: dict[str, torch.Tensor]) -> int:
    return sum(not torch.equal(held[name].to_local(), value) for name, value in values.items())


@scenario(ranks=2)
def dk204(lab: Lab) -> None:
    """Exported, kept, and read after the next step: other values."""
    bench = build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        with rec.phase("export"):
            held = dict(rec.exported(_weights(bench).items()))
        exported = _values(held)
        with rec.phase("train"):
            culprits.train(bench)
        lab.answer["changed"] = _changed(held, exported)
        with rec.phase("remedy"):
            copies = {name: value.clone() for name, value in rec.exported(_weights(bench).items())}
        del held
        exported = _values(copies)
        with rec.phase("train"):
            culprits.train(bench)
        lab.answer["changed then"] = _changed(copies, exported)


@scenario(ranks=2)
def dk204_half_way(lab: Lab) -> None:
    """A step between two tensors of one export, which is not over yet."""
    bench = build(DECODER, "pinned")
    with lab.recorded(bench) as rec, rec.phase("export"):
        kept = []
        for name, value in rec.exported(_weights(bench).items()):
            kept.append(value)
            if name == "layers.0.mlp.up.weight":
                culprits.train(bench)


@scenario(ranks=2)
def dk204_read_in_time(lab: Lab) -> None:
    """Each tensor is copied as it comes; nothing is held when the step writes."""
    bench = build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        for _ in range(2):
            with rec.phase("export"):
                sent = [value.to_local().sum() for _, value in rec.exported(_weights(bench).items())]
            with rec.phase("train"):
                culprits.train(bench)
        lab.answer["sent"] = len(sent)


@scenario(ranks=2)
def dk205(lab: Lab) -> None:
    """Taken before the first forward, which pins anew what had lost its pin."""
    bench = build(DECODER, "pinned")
    culprits.share_with_workers(bench.model)
    lab.answer |= _frozen(lab, bench)


@scenario(ranks=2)
def dk205_live(lab: Lab) -> None:
    """The same of a healthy model: on torch 2.13 its state dict stays live, also where the shard is padded."""
    lab.answer |= _frozen(lab, build(DECODER, "pinned"))


def _frozen(lab: Lab, bench: Bench) -> dict[str, Any]:
    with lab.recorded(bench) as rec:
        with rec.phase("export"):
            held = dict(rec.exported(bench.model.state_dict().items()))
        with rec.phase("eval"):
            culprits.evaluate(bench)
        taken = _values(held)
        with torch.no_grad():
            for value in bench.model.state_dict().values():
                value.to_local().add_(1.0)
        frozen = len(taken) - _changed(held, taken)
        with rec.phase("remedy"):
            again = dict(rec.exported(bench.model.state_dict().items()))
        return {"frozen": frozen, "right then": _values(again).keys() == taken.keys() and not _differ(again, bench)}


def _differ(tensors: dict[str, Any], bench: Bench) -> int:
    live = bench.model.state_dict()
    return sum(not torch.equal(value.to_local(), live[name].to_local()) for name, value in tensors.items())


@scenario(ranks=2, group="alone")
def dk403(lab: Lab) -> None:
    """Weights on the CPU, and a channel that was made for the accelerator."""
    bench = build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        with rec.phase("train"):
            bench.train()
        lab.fails(rec, "export", lambda: culprits.send(rec.exported(_whole(bench, "cpu"))))
        with rec.phase("remedy"):
            lab.answer["sent"] = culprits.send(rec.exported(_whole(bench, "npu")))


def _whole(bench: Bench, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in bench.model.state_dict().items():
        yield name, value.to("npu").full_tensor().to(device)


@scenario()
def dk403_hard_coded(lab: Lab) -> None:
    bench = build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        lab.fails(rec, "export", lambda: [culprits.stage(value) for _, value in rec.exported(_whole(bench, "cpu"))])


# ---- copies that do not wait


@scenario()
def dk703(lab: Lab) -> None:
    """Staged to the host without waiting, and read at once."""
    bench = build(DECODER, "pinned")
    simulate().set_deferred_copies(True)
    with dk.record(bench.model, bench.optimizer, out=lab.folder, detail="full") as rec:
        with rec.phase("export"):
            weights = dict(rec.exported(_whole(bench, "npu")))
            early = culprits.checksum(culprits.stage_to_host(weights))
        with rec.phase("remedy"):
            weights = dict(rec.exported(_whole(bench, "npu")))
            host = culprits.stage_to_host(weights)
            torch.npu.synchronize()  # type: ignore[attr-defined]
            waited = culprits.checksum(host)
    simulate().set_deferred_copies(False)
    lab.answer["right"] = [sum == right for sum, right in zip((early, waited), [_checksum(weights)] * 2, strict=True)]


def _checksum(weights: dict[str, torch.Tensor]) -> float:
    return culprits.checksum({name: tensor.cpu() for name, tensor in weights.items()})


@scenario(ranks=2)
def dk703_whole_model(lab: Lab) -> None:
    """Without the policy, a model that is parked on the CPU without waiting (verl #7347), and saved at once."""
    bench = build(DECODER, "none")
    simulate().set_deferred_copies(True)
    with dk.record(bench.model, bench.optimizer, out=lab.folder, detail="full") as rec, rec.phase("save"):
        culprits.park(bench.model)
        saved = culprits.clones(bench.model)
    torch.npu.synchronize()  # type: ignore[attr-defined]
    simulate().set_deferred_copies(False)
    lab.answer["wrong"] = sum(
        not torch.equal(saved[name], parameter.to_local()) for name, parameter in bench.model.named_parameters()
    )


@scenario(ranks=2)
def dk703_waited_for(lab: Lab) -> None:
    """FSDP2's own copies, and those for which somebody waits: with a stream, an event, a blocking copy."""
    bench, like = build(DECODER, "pinned"), build(DECODER, "pinned")
    simulate().set_deferred_copies(True)
    with dk.record(bench.model, bench.optimizer, out=lab.folder, detail="full") as rec:
        for _ in range(2):
            with rec.phase("train"):
                culprits.train(bench)
            culprits.train(like)
        for wait in (
            lambda: torch.npu.synchronize(),  # type: ignore[attr-defined]
            lambda: torch.accelerator.synchronize(),
            lambda: torch.npu.current_stream().synchronize(),  # type: ignore[attr-defined]
            lambda: torch.npu.Event().synchronize(),  # type: ignore[attr-defined]
            lambda: torch.ones(1, device="npu").item(),
            lambda: torch.ones(1, device="npu").cpu(),
        ):
            with rec.phase("export"):
                host = culprits.stage_to_host(dict(rec.exported(_whole(bench, "npu"))))
                wait()
                culprits.checksum(host)
    torch.npu.synchronize()  # type: ignore[attr-defined]
    simulate().set_deferred_copies(False)
    lab.answer["same"] = _output(bench) == _output(like)


# ---- buffers that hold no values, or each rank's own


@scenario(ranks=2)
def dk502(lab: Lab) -> None:
    """Built on meta, given memory, loaded: the buffer that no checkpoint holds has whatever the memory held."""
    like = build(DECODER, "pinned")
    bench = build(DECODER, "pinned", on_meta=True)
    with lab.recorded(bench) as rec:
        with rec.phase("init"):
            culprits.give_memory(bench.model, "cpu")
        with rec.phase("load"):
            bench.model.load_state_dict(like.model.state_dict())
            culprits.buffers_to_device(bench.model, "npu")
        lab.look("live", bench)
        with rec.phase("eval"):
            lab.answer["right"] = _output(bench) == _output(like)
        with rec.phase("remedy"), torch.no_grad():
            bench.model.get_buffer("scale").copy_(like.model.get_buffer("scale"))
        lab.answer["right then"] = _output(bench) == _output(like)
        lab.cured(rec, bench)


def _output(bench: Bench) -> float:
    with torch.no_grad():
        return float(bench.loss())


@scenario(ranks=2)
def dk502_made_anew(lab: Lab) -> None:
    """What most libraries do: the buffer is computed again and put in its place. In one block without phases."""
    like = build(DECODER, "pinned")
    bench = build(DECODER, "pinned", on_meta=True)
    with lab.recorded(bench):
        culprits.give_memory(bench.model, "cpu")
        bench.model.load_state_dict(like.model.state_dict())
        bench.model.register_buffer("scale", torch.linspace(0.5, 1.5, 11).to("npu"), persistent=False)
        lab.answer["right"] = _output(bench) == _output(like)


@scenario(ranks=2)
def dk502_by_rank(lab: Lab) -> None:
    """Rank 0 alone computes the buffer; only the opt-in probe sees it."""
    bench = build(DECODER, "pinned")
    if lab.rank:
        with torch.no_grad():
            bench.model.get_buffer("scale").zero_()
    before = bench.model.get_buffer("scale").clone()
    with dk.record(bench.model, bench.optimizer, out=lab.folder, values=("buffers", "parameters")) as rec:
        with rec.phase("eval"):
            _output(bench)
        lab.answer["unchanged"] = torch.equal(before, bench.model.get_buffer("scale"))
        with rec.phase("remedy"):
            for buffer in bench.model.buffers():
                dist.broadcast(buffer, src=0)
        with rec.phase("eval"):
            _output(bench)
    with dk.record(bench.model, bench.optimizer, out=lab.folder / "unasked") as rec, rec.phase("eval"):
        _output(bench)


@scenario(ranks=2)
def dk502_statistics(lab: Lab) -> None:
    """Batch statistics begin alike and go their own ways, as those of FSDP do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to("npu")
    fully_shard(model)
    with dk.record(model, out=lab.folder, values=("buffers",)) as rec:
        for _ in range(2):
            with rec.phase("train"):
                model(torch.randn(8, 4).add_(lab.rank).to("npu")).sum().backward()
    lab.answer["mean"] = model[1].running_mean.cpu().tolist()


class _Own(nn.Module):
    """A cache that is empty at first and as long as the rank's batch later, the rank's number, and statistics."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.register_buffer("rank_offset", torch.tensor([rank]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = x.detach() + self.rank_offset
        normed: torch.Tensor = self.norm(self.layer(x))
        return normed


@scenario(ranks=2)
def dk502_own(lab: Lab) -> None:
    """Buffers that rightly differ by rank, and did before anybody looked."""
    torch.manual_seed(0)
    model = _Own(lab.rank).to("npu")
    fully_shard(model)
    inputs = torch.randn(8 + lab.rank, 4).add_(lab.rank).to("npu")
    model(inputs).sum().backward()
    model.cache = torch.zeros(0, device="npu")
    with dk.record(model, out=lab.folder, values=("buffers",)) as rec:
        for _ in range(2):
            with rec.phase("train"):
                model(inputs).sum().backward()


# ---- detail "full"


@scenario(ranks=2)
def full_step(lab: Lab) -> None:
    """Two steps of training and an evaluation, at both details."""
    bench = build(DECODER, "pinned")
    with contextlib.ExitStack() as stack:
        recorders = [
            stack.enter_context(dk.record(bench.model, bench.optimizer, out=lab.folder / detail, detail=detail))
            for detail in ("full", "transitions")
        ]
        for name in ("train", "train", "eval"):
            with contextlib.ExitStack() as phases:
                for recorder in recorders:
                    phases.enter_context(recorder.phase(name))
                culprits.train(bench) if name == "train" else culprits.evaluate(bench)


@scenario()
def full_failing_backward(lab: Lab) -> None:
    bench = build(DECODER, "pinned")
    bench.train()
    with dk.record(bench.model, bench.optimizer, out=lab.folder, detail="full") as rec:
        hidden = bench.model.get_submodule("layers.0").register_full_backward_hook(_raises)
        lab.fails(rec, "train", lambda: culprits.train(bench))
        hidden.remove()


def _raises(*_: Any) -> None:
    raise ValueError("a hook of the user's own")


@scenario(ranks=2)
def full_hsdp(lab: Lab) -> None:
    """Replicated over two ranks, each alone in its shard group."""
    mesh = init_device_mesh("npu", (2, 1), mesh_dim_names=("replicate", "shard"))
    _lives(lab, _bench(mesh, CPUOffloadPolicy()), _bench(mesh, CPUOffloadPolicy()))


@scenario(ranks=2)
def full_checkpointing(lab: Lab) -> None:
    """Every layer's forward runs again in backward."""
    mesh = init_device_mesh("npu", (2,))
    _lives(lab, *(_bench(mesh, CPUOffloadPolicy(), checkpointed=True) for _ in range(2)))


@scenario(ranks=2)
def full_fsdp1(lab: Lab) -> None:
    _lives(lab, _fsdp1(), _fsdp1())


def _bench(mesh: DeviceMesh, policy: CPUOffloadPolicy, checkpointed: bool = False) -> Bench:
    torch.manual_seed(0)
    model = Decoder()
    for n, layer in enumerate(model.layers):
        if checkpointed:
            model.layers[n] = layer = checkpoint_wrapper(layer)
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    buffers_to(model, "npu")
    return Bench(model, torch.optim.AdamW(model.parameters(), lr=0.01), DECODER, "npu")


def _fsdp1() -> Bench:
    torch.manual_seed(0)
    with torch.device("npu"):
        inner = Decoder()
    model = FullyShardedDataParallel(inner, device_id=torch.device("npu", dist.get_rank()), use_orig_params=True)
    return Bench(model, torch.optim.AdamW(model.parameters(), lr=0.01), DECODER, "npu")


def _lives(lab: Lab, bench: Bench, like: Bench) -> None:
    """Trains both alike, one of them recorded in full."""
    with dk.record(bench.model, bench.optimizer, out=lab.folder, detail="full") as rec:
        losses = []
        for _ in range(3):
            with rec.phase("train"):
                losses.append(float(bench.loss().detach()))
                culprits.train(bench)
        with rec.phase("save"):
            bench.model.state_dict()
    alone = []
    for _ in range(3):
        alone.append(float(like.loss().detach()))
        culprits.train(like)
    lab.answer["same"] = losses == alone and all(
        torch.equal(a.to_local() if isinstance(a, DTensor) else a, b.to_local() if isinstance(b, DTensor) else b)
        for a, b in zip(bench.model.parameters(), like.model.parameters(), strict=True)
    )
    lab.answer["learnt"] = losses[0] != losses[-1]
    lab.answer["live"] = list(dk.inspect(bench.model, bench.optimizer).findings.codes)


def run(folder: Path, only: str = "") -> dict[str, list[dict[str, Any] | None]]:
    """Every scenario whose name begins with one of ``only`` (divided by commas), each on fresh ranks."""
    results = {}
    for name, (function, ranks, group) in SCENARIOS.items():
        if not name.startswith(tuple(only.split(","))):
            continue

        def work(
            rank: int, tell: Callable[[dict[str, Any]], None], function: Scenario = function, name: str = name
        ) -> None:
            lab = Lab(folder / name, rank)
            try:
                function(lab)
                dist.barrier()
            finally:
                tell(lab.answer)

        results[name] = fork_ranks(work, ranks, group=group, timeout=30)
    return results


def main() -> None:
    folder = Path(sys.argv[1])
    warm_up()
    started = time.monotonic()
    results = run(folder, *sys.argv[2:])
    (folder / "results.json").write_text(json.dumps(results))
    print(f"{len(results)} scenarios in {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
