"""What the simulated accelerator must compute: the CPU's values and gradients, bit for bit. Adds cases to the table."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from simdevice_cases import case, raises, rand
from torch import Tensor, nn
from torch.nn import functional as F

SAMPLES: dict[str, Callable[[Tensor], Any]] = {
    "matmul": lambda x: x @ x.t(),
    "addmm": lambda x: torch.addmm(x, x, x),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(0),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(dim=0),
    "topk": lambda x: x.topk(2),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "foreach_norm": lambda x: torch._foreach_norm([x, x[0]]),
    "where": lambda x: torch.where(x > 0, x, -x),
    "nonzero": lambda x: (x > 0).nonzero(),
    "unique": lambda x: (x > 0).int().unique(return_counts=True),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.5),
    "masked_select": lambda x: x.masked_select(x > 0),
    "gather": lambda x: x.gather(1, x.argsort(1)),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(0, x.argsort(0), x),
    "index_put": lambda x: x.clone().index_put_((torch.tensor([0, 1]),), torch.ones((), device=x.device)),
    "cat_stack": lambda x: (torch.cat([x, x]), torch.stack([x, x], 1)),
    "var_mean": lambda x: torch.var_mean(x, 0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x.unsqueeze(0), 2),
    "gelu_silu": lambda x: (F.gelu(x), F.silu(x), F.gelu(x, approximate="tanh")),
    "solve": lambda x: torch.linalg.solve(x @ x.t() + 10 * torch.eye(x.shape[0], device=x.device), x),
    "svd": lambda x: torch.linalg.svdvals(x),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
    "max_pool": lambda x: F.max_pool2d(x[None, None], 2, return_indices=True),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
    "roll_flip": lambda x: (x.roll(1, 0), x.flip(1)),
    "bf16 round trip": lambda x: x.bfloat16().float(),
    "bf16 matmul": lambda x: x.bfloat16() @ x.bfloat16(),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "equal": lambda x: torch.tensor([torch.equal(x, x.clone()), torch.allclose(x, x + 1)]),
}


@case
def results_are_the_cpus_bit_for_bit() -> None:
    x = rand(6, 6)
    for name, sample in SAMPLES.items():
        on_cpu, on_device = _tensors(sample(x)), _tensors(sample(x.npu()))
        assert len(on_cpu) == len(on_device) > 0
        for a, b in zip(on_cpu, on_device, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.cpu()), name


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for item in value for t in _tensors(item)]


def same_gradients(call: Callable[..., Tensor], *inputs: Tensor) -> None:
    """The loss and every gradient of ``call`` are the same bits on the CPU and on the device."""
    outcomes = []
    for device in ("cpu", "npu"):
        leaves = [t.detach().to(device).requires_grad_(t.is_floating_point()) for t in inputs]
        result = call(*leaves)
        result.float().square().sum().backward()
        outcomes.append([result, *[leaf.grad for leaf in leaves if leaf.grad is not None]])
    for a, b in zip(*outcomes, strict=True):
        assert b.device.type == "npu" and torch.equal(a, b.cpu()), (a - b.cpu()).abs().max()


@case
def attention_is_the_cpus_in_every_form() -> None:
    q, k, v = rand(2, 3, 5, 8), rand(2, 3, 7, 8), rand(2, 3, 7, 8) * 2
    mask = rand(2, 1, 5, 7)
    same_gradients(F.scaled_dot_product_attention, q, k, v)
    same_gradients(lambda q, k, v: F.scaled_dot_product_attention(q, q, q, is_causal=True), q, k, v)
    same_gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.device)), q, k, v)
    same_gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.device) > 0), q, k, v)
    same_gradients(F.scaled_dot_product_attention, q.bfloat16(), k.bfloat16(), v.bfloat16())
    same_gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True), q, k, v)
    torch.manual_seed(0)
    assert F.scaled_dot_product_attention(q.npu(), k.npu(), v.npu(), dropout_p=0.5).device.type == "npu"


@case
def layers_and_losses_have_the_cpus_gradients() -> None:
    same_gradients(lambda x, w, b: F.conv2d(x, w, b, padding=1), rand(2, 3, 6, 6), rand(4, 3, 3, 3), rand(4))
    same_gradients(lambda x, w: F.conv_transpose2d(x, w, stride=2), rand(2, 3, 4, 4), rand(3, 2, 3, 3))
    same_gradients(lambda x, w, b: F.conv1d(x, w, b, groups=2), rand(2, 4, 9), rand(4, 2, 3), rand(4))
    for dtype in (torch.float32, torch.bfloat16):
        same_gradients(
            lambda x, w, b: F.layer_norm(x, (6,), w, b),
            rand(4, 6, dtype=dtype),
            rand(6, dtype=dtype),
            rand(6, dtype=dtype),
        )
        same_gradients(lambda x, w: F.rms_norm(x, (6,), w), rand(4, 6, dtype=dtype), rand(6, dtype=dtype))
        same_gradients(lambda x: F.batch_norm(x, None, None, training=True), rand(4, 6, dtype=dtype))
    ids = torch.tensor([[1, 2, 2], [0, 4, 1]])
    same_gradients(lambda w: F.embedding(ids.to(w.device), w), rand(5, 3))
    same_gradients(lambda x: F.cross_entropy(x, torch.tensor([0, 2, 1]).to(x.device)), rand(3, 4))
    same_gradients(lambda x, w, b: F.gelu(F.linear(x, w, b)), rand(3, 4), rand(5, 4), rand(5))


@case
def autocast_lowers_matrix_products_and_keeps_sensitive_operators() -> None:
    x, layer = rand(4, 6).npu(), nn.Linear(6, 6).npu()
    with torch.autocast("npu", dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype == (x @ x.t()).dtype == torch.bfloat16
        assert y.softmax(-1).dtype == F.layer_norm(y, (6,)).dtype == y.exp().dtype == torch.float32
        assert F.cross_entropy(y, torch.tensor([0, 1, 2, 3]).npu()).dtype == torch.float32
        assert F.scaled_dot_product_attention(x[None], x[None], x[None]).dtype == torch.bfloat16
        with torch.autocast("npu", enabled=False):
            assert layer(x).dtype == torch.float32
    assert layer(x).dtype == torch.float32 and not torch.npu.is_autocast_enabled()
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    with torch.npu.amp.autocast(dtype=torch.float16):
        assert torch.npu.is_autocast_enabled() and torch.npu.get_autocast_dtype() == layer(x).dtype == torch.float16
    assert torch.bfloat16 in torch.npu.get_amp_supported_dtype()
    with torch.autocast("npu", dtype=torch.bfloat16):
        on_device = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(on_device.cpu(), copy.deepcopy(layer).cpu()(x.cpu())), "the same product as the CPU's"


@case
def a_gradient_scaler_unscales_and_skips_infinities() -> None:
    scaler = torch.amp.GradScaler("npu", init_scale=4.0)
    p = nn.Parameter(torch.ones(2, device="npu"))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(p.detach().cpu(), torch.zeros(2))
    p.grad = torch.full((2,), float("inf"), device="npu")
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(p.detach().cpu(), torch.zeros(2)) and scaler.get_scale() == 2.0


@case
def activation_checkpointing_repeats_the_same_randomness() -> None:
    from torch.utils.checkpoint import checkpoint

    x = rand(8, 8).npu().requires_grad_()

    def block(t: Tensor) -> Tensor:
        return F.dropout(torch.tanh(t @ t), 0.5)

    gradients = []
    for run in (
        block,
        lambda t: checkpoint(block, t, use_reentrant=True),
        lambda t: checkpoint(block, t, use_reentrant=False),
    ):
        torch.manual_seed(3)
        x.grad = None
        run(x).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad.clone())
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


@case
def zeros_without_memory_may_be_read_and_sent_home() -> None:
    x = rand(3).npu().requires_grad_()
    x.sgn().sum().backward()  # a gradient that is known to vanish: PyTorch makes it without memory
    assert (
        x.grad is not None
        and torch.equal(x.grad.cpu(), torch.zeros(3))
        and torch.equal((x.grad + 1).cpu(), torch.ones(3))
    )
    raises("dense tensors only", lambda: rand(3, 3).npu().to_sparse())


@case
def optimizers_step_as_on_the_cpu() -> None:
    def trained(device: str, **options: Any) -> Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(5, 3).to(device)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            layer(rand(4, 5).to(device)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.5)
            optimizer.step()
        return layer.weight.detach().cpu()

    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        assert torch.equal(trained("cpu", **options), trained("npu", **options)), options
    assert torch.equal(trained("cpu", foreach=False), trained("npu")), (
        "the default picks foreach on a device: the same bits"
    )
