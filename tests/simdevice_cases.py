"""What one process must be able to do on the simulated accelerator: a table of checks, each a function that asserts.

They run in a process of their own, because a process that has started the simulator can never be without it again.
"""

from __future__ import annotations

import copy
import io
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

npu: Any = None  # torch.npu, once the simulator runs
sim: Any = None
CASES: dict[str, Callable[[], None]] = {}


def case(check: Callable[[], None]) -> Callable[[], None]:
    CASES[check.__name__] = check
    return check


def raises(message: str, call: Callable[[], object], kind: type[BaseException] = RuntimeError) -> None:
    try:
        call()
    except kind as error:
        assert message in str(error), f"{message!r} not in {str(error)!r}"
        return
    raise AssertionError(f"nothing raised; expected {kind.__name__}: {message}")


def rand(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


@case
def eight_devices_and_one_current() -> None:
    assert npu.device_count() == torch.accelerator.device_count() == 8
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    npu.set_device(3)
    assert torch.empty(1, device="npu").device == torch.device("npu:3")
    with npu.device(5):
        assert npu.current_device() == 5 and torch.zeros(1, device="npu").device.index == 5
    assert npu.current_device() == 3
    npu.set_device("npu:0")
    raises("invalid device ordinal 8", lambda: npu.set_device(8))
    assert rand(2).to("npu:2").device.index == 2 and rand(2).npu(1).is_npu


@case
def starting_twice_gives_the_same_simulation() -> None:
    from diagkit.errors import UsageError
    from diagkit.lab import running, simulate

    assert simulate() is sim and running() is sim and sim.simulated
    raises("already runs under another name", lambda: simulate("xpu2"), UsageError)


@case
def streams_have_an_identity() -> None:
    first, second = npu.Stream(), npu.Stream(priority=-1)
    assert first.stream_id != second.stream_id and first != second
    before = npu.current_stream()
    with npu.stream(first):
        assert npu.current_stream() == first
        with npu.stream(second):
            assert npu.current_stream().stream_id == second.stream_id
        assert npu.current_stream() == first
    assert npu.current_stream() == before == npu.default_stream()
    event = first.record_event()
    second.wait_event(event)
    second.wait_stream(first)
    second.synchronize()
    assert second.query() and event.query()


@case
def timed_events_measure_time() -> None:
    start, end = npu.Event(enable_timing=True), npu.Event(enable_timing=True)
    start.record()
    a = rand(200, 200).npu()
    for _ in range(20):
        a = a @ a
    end.record()
    end.synchronize()
    assert 0.0 < start.elapsed_time(end) < 60_000.0


@case
def a_generator_has_sixteen_bytes_of_seed_and_offset() -> None:
    state = npu.get_rng_state()
    assert state.dtype == torch.uint8 and state.numel() == 16 and state.device.type == "cpu"
    torch.manual_seed(5)
    first = torch.randn(4, device="npu")
    middle = npu.get_rng_state()
    second = torch.randn(4, device="npu")
    npu.set_rng_state(middle)
    assert torch.equal(second, torch.randn(4, device="npu")) and not torch.equal(first, second)
    torch.manual_seed(5)
    on_cpu = torch.randn(4)
    assert torch.equal(on_cpu, first.cpu()), "the first draw after a seed is the CPU's"
    generator = torch.Generator(device="npu").manual_seed(9)
    drawn = torch.rand(3, device="npu", generator=generator)
    assert torch.equal(drawn, torch.rand(3, device="npu", generator=torch.Generator(device="npu").manual_seed(9)))
    clone = torch.Generator(device="npu")
    clone.set_state(generator.get_state())
    assert torch.equal(torch.rand(3, device="npu", generator=clone), torch.rand(3, device="npu", generator=generator))
    npu.manual_seed_all(1)
    assert torch.equal(torch.rand(3, device="npu:1").cpu(), torch.rand(3, device="npu:6").cpu())


@case
def drawing_on_the_device_leaves_the_cpu_generator_alone() -> None:
    before = torch.get_rng_state()
    x = torch.ones(100, device="npu")
    F.dropout(x, 0.5)
    torch.native_dropout(x, 0.5, True)
    torch.randperm(10, device="npu")
    torch.multinomial(torch.ones(4, device="npu"), 2)
    assert torch.equal(before, torch.get_rng_state())


@case
def memory_counters_follow_allocations() -> None:
    base, held = npu.memory_allocated(4), npu.memory_reserved(4)
    block = torch.empty(1000, device="npu:4")
    assert npu.memory_allocated(4) == torch.accelerator.memory_allocated(4) == base + 4000
    npu.reset_peak_memory_stats(4)
    more = block + 1
    assert npu.memory_allocated(4) == base + 8000, "a result that the host computed counts too"
    del more
    assert npu.memory_allocated(4) == base + 4000 and npu.max_memory_allocated(4) == base + 8000
    block.untyped_storage().resize_(0)
    assert npu.memory_allocated(4) == base and npu.memory_reserved(4) == held
    assert npu.memory_stats(4)["allocated_bytes.all.peak"] == base + 8000
    assert npu.memory_allocated(7) == 0


@case
def a_full_device_raises_out_of_memory() -> None:
    sim.set_capacity(npu.memory_allocated(6) + 10_000, device=6)
    kept = torch.empty(2000, device="npu:6")
    raises("NPU out of memory (simulated)", lambda: torch.empty(2000, device="npu:6"), torch.OutOfMemoryError)
    raises("NPU out of memory (simulated)", lambda: kept.add(1), torch.OutOfMemoryError)
    assert npu.memory_stats(6)["num_ooms"] == 2
    assert torch.empty(2000, device="npu:5").numel() == 2000, "other devices have room"
    if hasattr(torch.accelerator, "get_memory_info"):
        assert npu.mem_get_info(6) == (2000, 10_000)
    kept = torch.empty(0)
    assert torch.empty(2000, device="npu:6").numel() == 2000
    sim.set_capacity(0)
    assert torch.empty(20_000, device="npu:6").numel() == 20_000


@case
def pinned_memory_is_known_by_its_address() -> None:
    pinned_before = npu.host_memory_pinned()
    a = torch.empty(10, 10, pin_memory=True)
    assert a.is_pinned() and a[5:].is_pinned() and a.t().is_pinned() and not torch.empty(10).is_pinned()
    b = rand(7).pin_memory()
    assert b.is_pinned() and torch.equal(b, rand(7))
    assert npu.host_memory_pinned() == pinned_before + 400 + 28
    assert not a.npu().cpu().is_pinned() and not a.clone().is_pinned()
    raises("pin_memory is for CPU tensors", lambda: torch.empty(1, device="npu", pin_memory=True))
    del a, b
    assert npu.host_memory_pinned() == pinned_before


@case
def non_blocking_copies_arrive_at_once_by_default() -> None:
    host = torch.zeros(4).pin_memory()
    host.copy_(torch.ones(4, device="npu"), non_blocking=True)
    assert host.sum() == 4


@case
def deferred_copies_show_stale_bytes_until_synchronised() -> None:
    def copied() -> Tensor:
        host = torch.zeros(4).pin_memory()
        source = torch.ones(4, device="npu")
        host.copy_(source, non_blocking=True)
        source.fill_(9)  # later work on the stream does not change what was copied
        return host

    sim.set_deferred_copies(True)
    try:
        host = copied()
        assert host.sum() == 0
        npu.synchronize()
        assert host.sum() == 4
        host = copied()
        event = npu.current_stream().record_event()
        later = copied()
        event.synchronize()
        assert host.sum() == 4 and later.sum() == 0, "an event covers what came before it, nothing else"
        other = npu.Stream()
        other.wait_stream(npu.current_stream())
        other.synchronize()
        assert later.sum() == 4, "waiting for a stream that waits for the copy's stream"
        host = copied()
        assert torch.ones(1, device="npu").item() == 1 and host.sum() == 4, "item() waits for the stream"
        host = copied()
        torch.ones(2, device="npu").cpu()
        assert host.sum() == 4, "a blocking copy waits for what is ahead of it"
        side = npu.Stream()
        with npu.stream(side):
            host = copied()
        npu.current_stream().synchronize()
        assert host.sum() == 0, "another stream's copy is not covered"
        event = npu.Event()
        event.record(side)
        assert not event.query() and event.query() and host.sum() == 4, "a polling loop ends"
        fresh = torch.ones(4, device="npu").to("cpu", non_blocking=True)
        assert fresh.is_pinned() and fresh.sum() == 0, "PyTorch pins the target of a non_blocking move by itself"
        npu.synchronize()
        assert fresh.sum() == 4
        pageable = torch.zeros(4)
        pageable.copy_(torch.ones(4, device="npu"), non_blocking=True)
        assert pageable.sum() == 4, "only pinned memory can be late"
    finally:
        npu.synchronize()
        sim.set_deferred_copies(False)


@case
def healthy_tensors_survive_deepcopy_save_and_load() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to("npu")
    clone = copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), clone.state_dict().values(), strict=True))
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "view": model[0].weight.detach()[1:]}, buffer)
    for where, device in ((None, "npu"), ("cpu", "cpu"), ("npu:1", "npu")):
        buffer.seek(0)
        loaded = torch.load(buffer, map_location=where)
        assert loaded["model"]["0.weight"].device.type == device
        assert torch.equal(loaded["model"]["0.weight"].cpu(), model[0].weight.detach().cpu())
        assert torch.equal(loaded["view"].cpu(), model[0].weight.detach()[1:].cpu())
    assert torch.load(_saved_on("npu:3")).device == torch.device("npu:3")


def _saved_on(device: str) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(torch.ones(2, device=device), buffer)
    buffer.seek(0)
    return buffer


@case
def storages_copy_and_resize() -> None:
    a, b = rand(6), torch.zeros(6, device="npu")
    b.untyped_storage().copy_(a.untyped_storage())
    assert torch.equal(a, b.cpu())
    c = torch.zeros(6)
    c.untyped_storage().copy_(b.untyped_storage(), non_blocking=True)
    assert torch.equal(a, c)
    b.untyped_storage().resize_(8 * 4)
    assert b.untyped_storage().nbytes() == 32 and torch.equal(a, b.cpu()), "growing keeps what was there"
    assert b.untyped_storage().device == torch.device("npu:0")
    fresh = torch.UntypedStorage(16, device="npu")
    assert fresh.device.type == "npu" and fresh.npu() is fresh and b.untyped_storage().cpu().device.type == "cpu"


@case
def every_set_overload_works_and_checks_the_device() -> None:
    source = torch.arange(12.0, device="npu")
    assert torch.empty(0, device="npu").set_(source.untyped_storage()).numel() == 48 // 4
    placed = torch.empty(0, device="npu").set_(source.untyped_storage(), 2, (2, 3), (3, 1))
    assert torch.equal(placed.cpu(), torch.arange(2.0, 8.0).view(2, 3))
    same = torch.empty(0, device="npu").set_(source)
    same[0] = 50
    assert source[0].item() == 50
    assert torch.empty(0, device="npu").set_(source, 1, (2,), (1,)).tolist() == [1.0, 2.0]
    emptied = torch.ones(3, device="npu").set_()
    assert emptied.shape == (0,) and emptied.device.type == "npu"
    text = 'Attempted to set the storage of a tensor on device "npu:0" to a storage on different device "cpu"'
    raises(text, lambda: torch.empty(0, device="npu").set_(torch.ones(3).untyped_storage()))
    text = 'Attempted to set the storage of a tensor on device "cpu" to a storage on different device "npu:0"'
    raises(text, lambda: torch.empty(0).set_(source.untyped_storage()))


@case
def data_may_cross_devices_and_modules_keep_their_parameters() -> None:
    p = nn.Parameter(rand(3))
    p.data = p.data.to("npu")
    assert p.device.type == "npu"
    p.sum().backward()
    assert p.grad is not None and p.grad.device.type == "npu"
    module = nn.Linear(2, 2)
    weight, values = module.weight, module.weight.detach().clone()
    assert module.to("npu").weight is weight and weight.device.type == "npu"
    assert module.cpu().weight is weight and torch.equal(weight, values)
    assert module.npu().weight.is_npu
    meta = nn.Linear(2, 2, device="meta")
    assert meta.to_empty(device="npu").weight.device.type == "npu"


@case
def views_share_memory() -> None:
    base = rand(4, 6).npu()
    views: list[Tensor] = [base.view(24), base[1], base.t(), base.as_strided((2, 2), (6, 1), 3), base.unfold(1, 2, 2)]
    views += [base.view(torch.int32), *base.chunk(2), base.unsqueeze(0).expand(3, 4, 6), base.diagonal(), base.detach()]
    views += [torch.view_as_complex(base.view(4, 3, 2)), base.squeeze(), base.flatten(), base.narrow(0, 1, 2)]
    for view in views:
        assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr() and view.device == base.device
    base.zero_()
    assert all(not view.any() for view in views)
    grown = torch.ones(2, device="npu")
    grown.resize_(3, 4)
    assert grown.shape == (3, 4) and grown.untyped_storage().nbytes() == 48


@case
def an_output_argument_is_resized_and_kept() -> None:
    out = torch.empty(0, device="npu")
    result = torch.add(rand(3, 2).npu(), 1, out=out)
    assert result is out and out.shape == (3, 2) and torch.equal(out.cpu(), rand(3, 2) + 1)
    values, indices = torch.empty(0, device="npu"), torch.empty(0, dtype=torch.long, device="npu")
    torch.sort(rand(5).npu(), out=(values, indices))
    assert torch.equal(values.cpu(), rand(5).sort().values)


@case
def devices_do_not_mix() -> None:
    a, b = rand(3, 3), rand(3, 3).npu()
    for call in (lambda: a + b, lambda: b + a, lambda: torch.mm(a, b), lambda: b.add_(a), lambda: torch.cat([a, b])):
        raises("Expected all tensors to be on the same device", call)
    raises("Expected all tensors to be on the same device", lambda: b + rand(3, 3).to("npu:1"))
    raises("Expected all tensors to be on the same device", lambda: torch._foreach_add([b, b], [a, b]))
    raises("can't convert npu:0 device type tensor to numpy", lambda: b.numpy(), TypeError)
    assert torch.equal((b + torch.tensor(2.0)).cpu(), a + 2), "a CPU scalar may join in"
    assert torch.equal(b[torch.tensor([2, 0])].cpu(), a[[2, 0]]), "indices may stay on the CPU"
    both = torch._foreach_mul([a, b], 2.0)
    assert [t.device.type for t in both] == ["cpu", "npu"], "lists over several devices go index by index"
    torch._foreach_copy_([b, a], [a, b])


@case
def factories_put_tensors_where_they_are_told() -> None:
    made = [torch.arange(5, device="npu"), torch.eye(2, device="npu"), torch.full((2,), 3, device="npu")]
    made += [
        torch.tensor([1.0, 2.0], device="npu"),
        torch.linspace(0, 1, 5, device="npu"),
        torch.tril_indices(3, 3, device="npu"),
    ]
    made += [
        torch.randint(0, 9, (4,), device="npu"),
        torch.randperm(6, device="npu"),
        torch.scalar_tensor(2, device="npu"),
    ]
    made += [
        torch.zeros_like(made[0]),
        torch.empty_like(made[1]),
        made[0].new_ones(2),
        torch.triu(made[1]),
        made[3].bool(),
    ]
    assert {t.device for t in made} == {torch.device("npu:0")}
    with torch.device("npu"):
        assert torch.ones(2).device.type == nn.Linear(2, 2).weight.device.type == "npu"
    assert "device='npu:0'" in repr(made[0])


@case
def a_host_thread_may_use_the_device() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(lambda i: (torch.ones(100, device=f"npu:{i}") * i).sum().item(), range(8)))
    assert sums == [100.0 * i for i in range(8)]


def main() -> None:
    """Runs every case and prints one JSON object: name -> "ok" or a traceback."""
    global npu, sim
    import simdevice_numerics  # noqa: F401  (adds its cases)

    from diagkit.lab import simulate

    sim = simulate(announce=False)
    npu = torch.npu  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    outcome = {}
    for name, check in CASES.items():
        try:
            check()
            outcome[name] = "ok"
        except Exception:
            outcome[name] = traceback.format_exc()
        npu.set_device(0)
    sys.stdout.write(json.dumps(outcome) + "\n")
