"""The machinery of `linear_cross_entropy`: loss and gradients of some tokens at a time.

N tokens, C tokens of one chunk, D hidden size, V vocabulary
"""

# pyright: reportIncompatibleMethodOverride=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves autograd's functions without types.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Reduction: TypeAlias = Literal["mean", "sum", "none"]
Grads: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]


class Options(NamedTuple):
    """What is the same for every chunk; see `linear_cross_entropy`."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    reduction: Reduction = "mean"
    chunk_size: int = 256


class Wanted(NamedTuple):
    """Which gradients are asked for."""

    x: bool = False
    weight: bool = False
    bias: bool = False


class ChunkedLoss(torch.autograd.Function):
    """The loss; where it is one number, its gradients are made along with it and only scaled in the backward pass."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        options: Options,
        wanted: Wanted,
    ) -> Tensor:
        valid_N = target_N != options.ignore_index
        target_N = target_N.where(valid_N, 0)
        counts_N = valid_N.to(_wide(x_ND))
        count = counts_N.sum() if options.reduction == "mean" else counts_N.new_ones(())
        # float16 would lose what is small before it is scaled up, so there the backward pass does it all.
        early = options.reduction != "none" and x_ND.dtype is not torch.float16
        scale_N = counts_N / count.clamp(min=1)
        asked = wanted if early else Wanted()
        loss_N, grads = chunked(x_ND, weight_VD, bias_V, target_N, scale_N, options, asked)
        ctx.save_for_backward(x_ND, weight_VD, bias_V, target_N, scale_N, *grads)
        ctx.options, ctx.wanted, ctx.fresh = options, wanted, early
        loss_N = loss_N.where(valid_N, 0)
        return loss_N if options.reduction == "none" else loss_N.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x_ND, weight_VD, bias_V, target_N, scale_N, *grads = ctx.saved_tensors
        if ctx.fresh and torch.compiler.is_compiling():
            grads = [None if g is None else g * grad for g in grads]
        elif ctx.fresh:
            ctx.fresh = False  # scaled where they are; a second backward pass makes them anew
            grads = [None if g is None else g.data.mul_(grad) for g in grads]
        else:
            _, made = chunked(x_ND, weight_VD, bias_V, target_N, scale_N * grad, ctx.options, ctx.wanted)
            grads = list(made)
        return (*grads, None, None, None)


def chunked(
    x_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    scale_N: Tensor,
    options: Options,
    wanted: Wanted,
) -> tuple[Tensor, Grads]:
    """Compute each token's loss, and the gradients of their sum weighted by ``scale_N``."""
    wide = _wide(x_ND)
    loss_N = torch.empty(x_ND.shape[0], dtype=wide, device=x_ND.device)
    x_grad_ND = torch.empty_like(x_ND) if wanted.x else None
    weight_grad_VD = torch.zeros_like(weight_VD, dtype=wide) if wanted.weight else None
    bias_grad_V = torch.zeros_like(weight_VD[:, 0], dtype=wide) if wanted.bias else None
    for start in range(0, x_ND.shape[0], options.chunk_size):
        some = slice(start, start + options.chunk_size)
        logits_CV = F.linear(x_ND[some], weight_VD, bias_V).to(wide)
        loss_N[some] = _step(logits_CV, target_N[some], scale_N[some], options, any(wanted))
        if x_grad_ND is not None:
            torch.mm(logits_CV.to(weight_VD.dtype), weight_VD, out=x_grad_ND[some])
        if weight_grad_VD is not None:
            _add_product(weight_grad_VD, logits_CV, x_ND[some])
        if bias_grad_V is not None:
            bias_grad_V += logits_CV.sum(0)
        del logits_CV
    weight_grad = None if weight_grad_VD is None else weight_grad_VD.to(weight_VD.dtype)
    return loss_N, (x_grad_ND, weight_grad, None if bias_grad_V is None else bias_grad_V.to(weight_VD.dtype))


def _step(logits_CV: Tensor, target_C: Tensor, scale_C: Tensor, options: Options, grad: bool) -> Tensor:
    """Compute the loss of some tokens; the logits are overwritten, by their gradients if these are asked for."""
    cap, spread = options.softcap, options.label_smoothing
    bent_CV: Tensor | None = None
    if cap is not None:
        logits_CV.div_(cap).tanh_()
        bent_CV = logits_CV.square().neg_().add_(1) if grad else None
        logits_CV.mul_(cap)
    target_C1 = target_C.unsqueeze(1)
    aim_C = logits_CV.gather(1, target_C1).squeeze(1)
    if spread:
        aim_C = aim_C * (1 - spread) + logits_CV.mean(1) * spread
    top_C1 = logits_CV.amax(1, keepdim=True)
    total_C1 = logits_CV.sub_(top_C1).exp_().sum(1, keepdim=True)
    loss_C = (total_C1.log() + top_C1).squeeze(1) - aim_C
    if grad:
        scale_C1 = scale_C.unsqueeze(1)
        logits_CV.mul_(scale_C1 / total_C1)
        logits_CV.scatter_add_(1, target_C1, scale_C1 * (spread - 1))
        if spread:
            logits_CV.sub_(scale_C1 * (spread / logits_CV.shape[1]))
        if bent_CV is not None:
            logits_CV.mul_(bent_CV)
    return loss_C


def _add_product(sum_VD: Tensor, grad_CV: Tensor, x_CD: Tensor) -> None:
    """Add ``grad.T @ x`` in the sum's precision; on a GPU half-precision factors stay so, for its matmul's sake."""
    if x_CD.dtype == sum_VD.dtype or x_CD.device.type == "cpu":
        sum_VD.addmm_(grad_CV.t(), x_CD.to(sum_VD.dtype))
    else:
        sum_VD += grad_CV.to(x_CD.dtype).t() @ x_CD


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def chunked_loss(
    x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor, options: Options, wanted: Wanted
) -> Tensor:
    """Apply `ChunkedLoss`."""
    apply: Callable[..., Tensor] = ChunkedLoss.apply
    return apply(x_ND, weight_VD, bias_V, target_N, options, wanted)
