"""The chunked loss beside torch's own."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slapo_fn.errors import ArgumentError, MisfitError, SizeError
from slapo_fn.nn import LinearCrossEntropy, linear_cross_entropy

from .support import EXACT, assert_survives


def inputs(
    dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (7,), vocab: int = 11
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = torch.randn(*shape, 5, dtype=dtype).requires_grad_()
    weight, bias = (torch.randn(*size, dtype=dtype).requires_grad_() for size in ((vocab, 5), (vocab,)))
    target = torch.randint(0, vocab, shape)
    target.view(-1)[1] = -100
    return x, weight, bias, target


def plain(x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, softcap=None, **options) -> Tensor:
    logits = F.linear(x, weight, bias)
    logits = logits if logits.dtype is torch.float64 else logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)
    return loss.view(target.shape) if options.get("reduction") == "none" else loss


OPTIONS = list(itertools.product(["mean", "sum", "none"], [0.0, 0.1, 1.0], [None, 2.0], [True, False]))


@pytest.mark.parametrize(("reduction", "label_smoothing", "softcap", "biased"), OPTIONS)
@pytest.mark.parametrize("shape", [(7,), (2, 4)])
def test_loss_and_gradients_equal_torch(reduction: str, label_smoothing, softcap, biased: bool, shape) -> None:
    x, weight, bias, target = inputs(shape=shape)
    options = {"reduction": reduction, "label_smoothing": label_smoothing, "softcap": softcap}
    options["bias"] = bias if biased else None
    leaves = [x, weight, bias] if biased else [x, weight]
    wanted = plain(x, weight, target, **options)
    upstream = torch.randn_like(wanted)
    for chunk_size in (3, 100):
        got = linear_cross_entropy(x, weight, target, chunk_size=chunk_size, **options)
        torch.testing.assert_close(got, wanted, **EXACT)
        expected = torch.autograd.grad(wanted, leaves, upstream, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(got, leaves, upstream), expected, **EXACT)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck(reduction: str) -> None:
    x, weight, bias, target = inputs()
    options = {"label_smoothing": 0.1, "softcap": 2.0, "reduction": reduction, "chunk_size": 3}
    assert torch.autograd.gradcheck(
        lambda *a: linear_cross_entropy(a[0], a[1], target, bias=a[2], **options), (x, weight, bias)
    )


@pytest.mark.parametrize("asked", list(itertools.product([True, False], repeat=3)))
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_only_where_they_are_asked_for(asked: tuple[bool, ...], reduction: str) -> None:
    x, weight, bias, target = inputs()
    for tensor, wanted in zip((x, weight, bias), asked, strict=True):
        tensor.requires_grad_(wanted)
    loss = linear_cross_entropy(x, weight, target, bias=bias, reduction=reduction)
    assert loss.requires_grad is any(asked)
    if any(asked):
        loss.sum().backward()
    assert [tensor.grad is not None for tensor in (x, weight, bias)] == list(asked)


def test_two_backward_passes_give_the_same() -> None:
    x, weight, bias, target = inputs()
    loss = linear_cross_entropy(x, weight, target, bias=bias)
    first, second, third = (torch.autograd.grad(loss * k, [x, weight, bias], retain_graph=True) for k in (1, 1, 3))
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(third, tuple(3 * g for g in first))
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(weight.grad, 2 * first[1])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_nothing_counts(reduction: str, label_smoothing: float) -> None:
    results = []
    for function in (plain, linear_cross_entropy):
        torch.manual_seed(0)
        x, weight, _, target = inputs()
        loss = function(x, weight, target.fill_(-100), reduction=reduction, label_smoothing=label_smoothing)
        loss.sum().backward()
        results.append((loss, x.grad, weight.grad))
    torch.testing.assert_close(results[1], results[0], equal_nan=True)


def test_another_index_is_ignored() -> None:
    x, weight, _, target = inputs()
    target = target.clamp(min=0)
    target[:3] = 4
    got = linear_cross_entropy(x, weight, target, ignore_index=4)
    torch.testing.assert_close(got, plain(x, weight, target, ignore_index=4), **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 4096.0])
def test_half_precision_sums_in_float32(dtype: torch.dtype, scale: float) -> None:
    x, weight, bias, target = inputs(dtype, (64,))
    loss = linear_cross_entropy(x, weight, target, bias=bias, chunk_size=5)
    wanted = plain(x, weight, target, bias=bias)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, wanted)
    got = torch.autograd.grad(loss * scale, [x, weight, bias])
    for mine, theirs in zip(got, torch.autograd.grad(wanted * scale, [x, weight, bias]), strict=True):
        assert mine.dtype is dtype
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2 * float(theirs.abs().max()))


def test_great_logits_do_not_overflow() -> None:
    x, weight, _, target = inputs(torch.float32)
    got = linear_cross_entropy(x * 1e3, weight * 1e3, target)
    torch.testing.assert_close(got, plain(x * 1e3, weight * 1e3, target))


def test_autocast() -> None:
    x, weight, _, target = inputs(torch.float32, (64,))
    with torch.autocast("cpu", torch.bfloat16):
        got, wanted = linear_cross_entropy(x, weight, target), plain(x, weight, target)
    torch.testing.assert_close(got, wanted)
    got.backward()
    assert weight.grad.dtype is torch.float32


class Live(TorchDispatchMode):
    """The largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.largest = max([self.largest, *made])
        return out


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_all_logits_never_exist(reduction: str) -> None:
    x = torch.randn(64, 4, requires_grad=True)
    weight = torch.randn(300, 4, requires_grad=True)
    with Live() as live:
        linear_cross_entropy(x, weight, torch.arange(64), chunk_size=8, reduction=reduction).sum().backward()
    assert live.largest == 8 * 300


def test_a_module_from_a_head() -> None:
    head = nn.Linear(5, 11, dtype=torch.float64).eval()
    loss = LinearCrossEntropy.from_linear(head, label_smoothing=0.1, softcap=3.0, chunk_size=3)
    assert loss.weight is head.weight
    assert loss.bias is head.bias
    assert not loss.training
    x, *_, target = inputs()
    wanted = plain(x, head.weight, target, bias=head.bias, label_smoothing=0.1, softcap=3.0)
    torch.testing.assert_close(loss(x, target), wanted, **EXACT)
    assert "label_smoothing=0.1" in repr(loss)
    with pytest.raises(MisfitError, match=r"plain nn\.Linear"):
        LinearCrossEntropy.from_linear(nn.ReLU())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_it_survives(reduction: str) -> None:
    x, *_, target = inputs()
    loss = LinearCrossEntropy(5, 11, bias=True, reduction=reduction, chunk_size=3, softcap=2.0, dtype=torch.float64)
    assert_survives(loss, lambda m: m(x, target))
    results = []
    for module in (loss, torch.compile(copy.deepcopy(loss), fullgraph=True, backend="aot_eager")):
        module.zero_grad()
        (3 * module(x, target)).sum().backward()
        results.append([p.grad for p in module.parameters()])
    torch.testing.assert_close(results[1], results[0])


def test_bad_arguments() -> None:
    x, weight, bias, target = inputs()
    for error, said, call in (
        (ArgumentError, "x is a tensor, not list", lambda: linear_cross_entropy([1], weight, target)),
        (ArgumentError, "target is int64", lambda: linear_cross_entropy(x, weight, target.float())),
        (SizeError, r"not \(7, 5\) and \(5, 11\)", lambda: linear_cross_entropy(x, weight.T, target)),
        (SizeError, r"target is \(7,\)", lambda: linear_cross_entropy(x, weight, target[:3])),
        (SizeError, r"bias is \(11,\), not \(7,\)", lambda: linear_cross_entropy(x, weight, target, bias=bias[:7])),
        (ArgumentError, "reduction is", lambda: linear_cross_entropy(x, weight, target, reduction="max")),
        (SizeError, "label_smoothing is", lambda: linear_cross_entropy(x, weight, target, label_smoothing=2)),
        (SizeError, "softcap is positive", lambda: linear_cross_entropy(x, weight, target, softcap=0)),
        (SizeError, "chunk_size is positive", lambda: LinearCrossEntropy(5, 11, chunk_size=0)),
    ):
        with pytest.raises(error, match=said):
            call()
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(x, weight, target + 50)
