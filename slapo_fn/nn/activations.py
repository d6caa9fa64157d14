"""Activations by name: every name that transformers' ``ACT2FN`` knows, with the same numbers and state-dict keys.

"gelu_new"   ->   Formula("gelu_new");   "relu"   ->   nn.ReLU();   a module   ->   itself
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._text import what
from ..errors import ArgumentError

Function: TypeAlias = Callable[[Tensor], Tensor]
Activation: TypeAlias = str | Function | nn.Module


def activation(name: Activation) -> nn.Module:
    """Make the module for an activation.

    Args:
        name: A name as in a transformers config, an elementwise function, a module (given back as it is), or a class of
            modules that needs no argument.

    Returns:
        A module that computes it elementwise: x of any shape to the same shape.

    Raises:
        ArgumentError: There is no activation of that name, or it is a thing of another kind.

    Example:
        >>> activation("gelu_new"), activation("silu"), activation(torch.tanh)
        (Formula(gelu_new), SiLU(), Formula(tanh))
    """
    if isinstance(name, nn.Module):
        return name
    if isinstance(name, str):
        if name in _MODULES:
            return _MODULES[name]()
        if name in _FORMULAS:
            return Formula(_FORMULAS[name], name)
        near = difflib.get_close_matches(name, NAMES, 3, 0.4)
        hint = f"near ones are {', '.join(near)}" if near else f"there are {', '.join(NAMES)}"
        raise ArgumentError(f"there is no activation {name!r}; {hint}")
    if isinstance(name, type):
        return _instance(name)
    if callable(name):
        return Formula(name)
    raise ArgumentError(f"an activation is a name, a function or a module, not {what(name)}")


def _instance(kind: type[object]) -> nn.Module:
    if not issubclass(kind, nn.Module):
        raise ArgumentError(f"an activation is a name, a function or a module, not {what(kind)}")
    return kind()


def placed(name: Activation, like: Tensor) -> nn.Module:
    """The module for an activation; one that is made here has its own parameters where ``like`` is, and of its dtype."""
    module = activation(name)
    return module if module is name else module.to(like.device, like.dtype)


class Formula(nn.Module):
    """An elementwise function as a module.

    Args:
        function: The function; one of a module's top level, if this is to be pickled.
        name: How it is shown.

    Example:
        >>> Formula(torch.tanh)(torch.zeros(2))
        tensor([0., 0.])
    """

    name: str

    def __init__(self, function: Function, name: str | None = None) -> None:
        super().__init__()
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.name


class XIELU(nn.Module):
    """Compute xIELU, whose two slopes are learned (https://arxiv.org/abs/2411.13010).

    Args:
        alpha_p: The initial curvature above zero.
        alpha_n: The initial curvature below zero.
        beta: The slope at zero.
        eps: The upper bound of what is exponentiated.
        dtype: Of the parameters; bfloat16 as in transformers.

    Example:
        >>> XIELU()(torch.ones(1)).shape
        torch.Size([1])
    """

    alpha_p: nn.Parameter
    alpha_n: nn.Parameter
    beta: Tensor
    eps: Tensor

    def __init__(
        self,
        alpha_p: float = 0.8,
        alpha_n: float = 0.8,
        beta: float = 0.5,
        eps: float = -1e-6,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.log(torch.expm1(torch.tensor([alpha_p], dtype=dtype))))
        self.alpha_n = nn.Parameter(torch.log(torch.expm1(torch.tensor([alpha_n - beta], dtype=dtype))))
        self.register_buffer("beta", torch.tensor(beta, dtype=dtype))
        self.register_buffer("eps", torch.tensor(eps, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        alpha_p = F.softplus(self.alpha_p)
        alpha_n = self.beta + F.softplus(self.alpha_n)
        above = alpha_p * x * x + self.beta * x
        return torch.where(x > 0, above, (torch.expm1(torch.min(x, self.eps)) - x) * alpha_n + self.beta * x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _gelu_fast(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _gelu_erf(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _gelu_10(x: Tensor) -> Tensor:
    return torch.clip(F.gelu(x), -10, 10)


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _laplace(x: Tensor) -> Tensor:
    return 0.5 * (1.0 + torch.erf((x - 0.707107).div(0.282095 * math.sqrt(2.0))))


def _relu2(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


def _sqrtsoftplus(x: Tensor) -> Tensor:
    return F.softplus(x).sqrt()


def _gelu_pytorch_tanh() -> nn.Module:
    return nn.GELU(approximate="tanh")


_FORMULAS: dict[str, Function] = {
    "gelu_10": _gelu_10,
    "gelu_accurate": _gelu_tanh,
    "gelu_fast": _gelu_fast,
    "gelu_new": _gelu_tanh,
    "gelu_python": _gelu_erf,
    "gelu_python_tanh": _gelu_tanh,
    "laplace": _laplace,
    "quick_gelu": _quick_gelu,
    "relu2": _relu2,
    "sqrtsoftplus": _sqrtsoftplus,
}
_MODULES: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_pytorch_tanh": _gelu_pytorch_tanh,
    "hardswish": nn.Hardswish,
    "leaky_relu": nn.LeakyReLU,
    "linear": nn.Identity,
    "mish": nn.Mish,
    "prelu": nn.PReLU,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
    "xielu": XIELU,
}
NAMES = tuple(sorted({*_FORMULAS, *_MODULES}))
