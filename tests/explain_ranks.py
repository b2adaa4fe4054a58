"""Real exceptions, and what `dk.explain` makes of them: ``python explain_ranks.py OUT [ONLY]``.

A case brings a state about and returns what to call; the call raises, far from the model. What must come of it is in
`tests/test_explain.py`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import culprits
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

import diagkit as dk
from diagkit.demo.predictions.bench import DECODER, STRAIGHT, Bench, Kind, buffers_to, build
from diagkit.demo.predictions.forked import fork_ranks, warm_up

Call = Callable[[], object]
CASES: dict[str, tuple[Callable[[], Call], int, str]] = {}
KEPT: list[object] = []  # somebody holds the model, but no frame on the exception's way does


def case(ranks: int = 1, group: str = "mixed") -> Callable[[Callable[[], Call]], Callable[[], Call]]:
    def enter(make: Callable[[], Call]) -> Callable[[], Call]:
        CASES[make.__name__] = (make, ranks, group)
        return make

    return enter


def pinned(trained: bool = False, kind: Kind = DECODER) -> Bench:
    return _made("pinned", trained, kind)


def unpinned(trained: bool = False) -> Bench:
    return _made("unpinned", trained, DECODER)


def _made(policy: str, trained: bool, kind: Kind) -> Bench:
    bench = build(kind, policy)
    KEPT.append(bench)
    if trained:
        bench.train()
        bench.optimizer.zero_grad()
    return bench


def split(trained: bool = False, gradients: bool = False) -> Bench:
    bench = pinned(trained)
    if gradients:
        bench.train()
    culprits.load_model_to_device(bench.model, "npu")
    return bench


def mended(bench: Bench) -> Bench:
    culprits.offload_model_to_cpu(bench.model)
    buffers_to(bench.model, "npu")
    return bench


def swallowed(call: Call) -> None:
    try:
        call()
    except Exception:
        return
    raise AssertionError("was expected to fail")


# ---- "Attempted to set the storage"


@case()
def state_dict_of_a_split_model() -> Call:
    return split().model.state_dict


@case()
def get_model_state_dict_of_a_split_model() -> Call:
    bench = split()
    return lambda: get_model_state_dict(bench.model)


@case()
def state_dict_after_training_and_a_move() -> Call:
    return split(trained=True).model.state_dict


@case()
def state_dict_of_a_hand_made_split() -> Call:
    bench = pinned(trained=True)
    culprits.replace_the_local_tensors(bench.model, "npu")
    return bench.model.state_dict


@case()
def state_dict_of_a_layer_alone() -> Call:
    return split().model.get_submodule("layers.0").state_dict


@case(ranks=2)
def state_dict_on_two_ranks() -> Call:
    return split().model.state_dict


def _tensors(operation: Callable[[Tensor], object]) -> Call:
    tensors = list(split().model.parameters())
    return lambda: each(tensors, operation)


def each(things: list[Tensor], operation: Callable[[Tensor], object]) -> None:
    for thing in things:
        operation(thing)


@case()
def detach_without_any_module_in_sight() -> Call:
    return _tensors(torch.detach)


@case()
def view_without_any_module_in_sight() -> Call:
    return _tensors(lambda t: t.view(-1))


@case()
def data_without_any_module_in_sight() -> Call:
    return _tensors(lambda t: t.data)


@case()
def a_new_parameter_without_any_module_in_sight() -> Call:
    return _tensors(nn.Parameter)


@case()
def transpose_without_any_module_in_sight() -> Call:
    return _tensors(lambda t: t.t())


@case()
def export_in_a_generator() -> Call:
    bench = split()
    return lambda: [(name, value) for name, value in bench.model.state_dict().items() if value is not None]


@case()
def raised_from_another() -> Call:
    bench = split()

    def save() -> None:
        try:
            bench.model.state_dict()
        except RuntimeError as error:
            raise OSError("the checkpoint could not be written") from error

    return save


@case(ranks=2)
def an_engine_that_saves() -> Call:
    from diagkit.lab.engines import EngineConfig, build_engine

    engine = build_engine("veomni", "#7005", EngineConfig())
    KEPT.append(engine)
    return lambda: engine.save_checkpoint("/tmp/never-written")


# ---- "should be materialized on CPU"


@case()
def first_forward_of_a_split_model() -> Call:
    return split().loss


@case()
def first_forward_of_a_moved_model() -> Call:
    bench = unpinned()
    culprits.load_model_to_device(bench.model, "npu")
    return bench.loss


@case()
def first_forward_with_a_moved_child() -> Call:
    bench = pinned()
    culprits.move_one_child(bench.model, "npu")
    return bench.loss


@case(ranks=2)
def first_step_of_an_engine_with_two_owners() -> Call:
    from diagkit.lab.engines import EngineConfig, build_engine

    engine = build_engine("veomni", "#7103", EngineConfig(param_offload=True, optimizer_offload=True))
    KEPT.append(engine)

    def step() -> None:
        with engine.train_mode():
            engine.train_batch()

    return step


# ---- "attempting to assign a gradient"


@case()
def backward_of_a_split_model() -> Call:
    return split(trained=True).train


@case()
def backward_of_a_moved_model() -> Call:
    bench = unpinned(trained=True)
    culprits.load_model_to_device(bench.model, "npu")
    return bench.train


@case()
def backward_with_a_moved_child() -> Call:
    bench = pinned(trained=True)
    culprits.move_one_child(bench.model, "npu")
    return bench.train


# ---- "Expected all tensors to be on the same device"


@case()
def step_with_gradients_that_travelled() -> Call:
    return split(gradients=True).optimizer.step


@case()
def step_with_moments_moved_by_hand() -> Call:
    bench = pinned(trained=True)
    for state in bench.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].to("npu")
    return bench.train


@case()
def step_with_moments_loaded_while_split() -> Call:
    bench = pinned(trained=True)
    saved = bench.optimizer.state_dict()
    culprits.load_model_to_device(bench.model, "npu")
    culprits.restore_optimizer(bench.optimizer, saved)
    return mended(bench).train


@case()
def forward_with_buffers_on_the_cpu() -> Call:
    bench = pinned(kind=STRAIGHT)
    culprits.offload_model_to_cpu(bench.model)
    return bench.loss


@case()
def step_of_a_hand_made_split() -> Call:
    bench = pinned(trained=True)
    culprits.replace_the_local_tensors(bench.model, "npu")
    return bench.train


# ---- "Couldn't swap"


@case()
def second_move_of_a_split_model() -> Call:
    bench = split()
    return lambda: culprits.load_model_to_device(bench.model, "npu")


@case()
def mending_a_hand_made_split_by_a_move() -> Call:
    bench = pinned(trained=True)
    culprits.replace_the_local_tensors(bench.model, "npu")
    return lambda: culprits.offload_model_to_cpu(bench.model)


# ---- "No backend type associated with device type cpu"


@case(ranks=2, group="alone")
def clipping_without_a_cpu_backend() -> Call:
    bench = pinned()
    bench.train()
    return lambda: culprits.clip(bench)


@case(ranks=2, group="alone")
def gathering_without_a_cpu_backend() -> Call:
    bench = pinned()
    return lambda: [p.full_tensor() for p in bench.model.parameters() if isinstance(p, DTensor)]


# ---- meta, and what a failed first forward leaves behind


@case()
def forward_of_a_model_on_meta() -> Call:
    bench = build(DECODER, "pinned", on_meta=True)
    KEPT.append(bench)
    return bench.loss


@case()
def moving_a_model_on_meta() -> Call:
    bench = build(DECODER, "pinned", on_meta=True)
    return lambda: bench.model.to("npu")


@case()
def retry_after_it_was_mended() -> Call:
    bench = split()
    swallowed(bench.loss)
    return mended(bench).loss


@case()
def retry_while_it_is_still_split() -> Call:
    bench = split()
    swallowed(bench.loss)
    return bench.loss


@case()
def retry_of_a_moved_model() -> Call:
    bench = unpinned()
    culprits.load_model_to_device(bench.model, "npu")
    swallowed(bench.loss)
    return bench.loss


# ---- ordinary errors, most of them beside a model that is split


@case()
def ordinary_shape() -> Call:
    KEPT.append(split())
    return lambda: torch.zeros(2, 3) @ torch.zeros(2, 3)


@case()
def ordinary_shape_in_the_model() -> Call:
    bench = pinned(trained=True)
    return lambda: (
        bench.model(torch.zeros(2, 3, 4, 5, dtype=torch.int64, device="npu"))[0] @ torch.zeros(1, device="npu")
    )


@case()
def ordinary_missing_key() -> Call:
    bench = pinned()
    return lambda: bench.model.load_state_dict({"somebody.else": torch.zeros(1)})


@case()
def ordinary_key_error() -> Call:
    bench = split()
    return lambda: {"a": bench}["b"]


@case()
def ordinary_device_mix() -> Call:
    KEPT.append(split(gradients=True))
    return lambda: torch.zeros(2, device="npu") + torch.zeros(2)


@case()
def ordinary_device_mix_in_the_loss() -> Call:
    bench = pinned(trained=True)
    return lambda: bench.loss() * torch.zeros(3) + torch.zeros(3, device="npu")


@case()
def ordinary_device_mix_in_a_plain_model() -> Call:
    model = nn.Linear(2, 2)
    return lambda: model(torch.zeros(2, 2, device="npu"))


@case()
def ordinary_out_of_memory() -> Call:
    from diagkit.lab import simulate

    KEPT.append(split())
    simulate().set_capacity(1 << 20)
    return lambda: torch.zeros(1 << 22, device="npu")


@case()
def ordinary_corrupt_file() -> Call:
    KEPT.append(split())
    path = Path("/tmp") / f"diagkit-corrupt-{dist.get_rank()}-{time.time_ns()}.pt"
    path.write_bytes(b"this is no checkpoint")

    def load() -> None:
        try:
            torch.load(path)
        finally:
            path.unlink()

    return load


@case()
def ordinary_missing_file() -> Call:
    KEPT.append(split())
    return lambda: Path("/nowhere/at/all").read_text()


@case()
def ordinary_value_error_in_backward() -> Call:
    bench = pinned(trained=True)

    def mistake(*_: object) -> None:
        raise ValueError("a mistake in a user's own hook")

    bench.model.get_submodule("layers.0").register_full_backward_hook(mistake)
    return bench.train


@case()
def ordinary_second_backward() -> Call:
    bench = pinned(trained=True)
    loss = bench.loss()
    loss.backward()
    return loss.backward


@case(ranks=2, group="alone")
def ordinary_collective_of_a_cpu_tensor() -> Call:
    KEPT.append(pinned())
    return lambda: dist.all_reduce(torch.zeros(2))


@case()
def ordinary_dtype() -> Call:
    KEPT.append(split())
    return lambda: torch.zeros(2, 2) @ torch.zeros(2, 2, dtype=torch.float64)


@case()
def ordinary_meta_tensor() -> Call:
    KEPT.append(pinned())
    return lambda: torch.zeros(2, device="meta").cpu()


@case()
def ordinary_import() -> Call:
    KEPT.append(split())
    return lambda: __import__("a_package_that_is_not_there")


@case()
def ordinary_grad() -> Call:
    KEPT.append(split())
    return lambda: torch.zeros(1).backward()


def answer_of(make: Callable[[], Call]) -> dict[str, Any]:
    """Lets the case fail and asks what it was."""
    call = make()
    held = []
    try:
        call()
    except Exception as error:
        started = time.perf_counter()
        found = dk.explain()
        seconds = time.perf_counter() - started
        traceback = error.__traceback__
        while traceback is not None:
            held += [name for name in ("self", "model") if name in traceback.tb_frame.f_locals]
            traceback = traceback.tb_next
        return {
            **found.to_json(),
            "text": repr(found),
            "html": found._repr_html_(),
            "seconds": seconds,
            "held": held,
        }
    return {"error": "did not fail"}


def main() -> None:
    folder, only = Path(sys.argv[1]), "".join(sys.argv[2:])
    folder.mkdir(parents=True, exist_ok=True)
    warm_up()
    results = {}
    for name, (make, ranks, group) in CASES.items():
        if only not in name:
            continue

        def work(rank: int, tell: Callable[[dict[str, Any]], None], make: Callable[[], Call] = make) -> None:
            tell(answer_of(make))

        results[name] = fork_ranks(work, ranks, group=group, loud=bool(only))
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
