"""Models that are hard to transform, one line each in `MODELS`: a new one gets every law's tests."""

from __future__ import annotations

import functools
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.utils as nn_utils
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations, parametrize

WIDTH = 4  # x_BTD has B=2, T=3, D=WIDTH wherever a model doesn't say otherwise


class Model(NamedTuple):
    """One hard model.

    Attributes:
        name: Its name in the tests.
        build: Makes it, from the random state as it is.
        inputs: Makes its positional inputs.
        places: A pattern of modules that primitives for any module are tried on.
        linears: A pattern of plain Linears, for primitives that need one; empty when there is none.
        lazy: Whether it has parameters without a shape.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    places: str | list[str] = "*"
    linears: str = ""
    lazy: bool = False

    def make(self) -> nn.Module:
        """A model of its own, the same at every call."""
        torch.manual_seed(0)
        return self.build()


def x_BTD() -> tuple[Tensor, ...]:
    return (torch.linspace(-1, 1, 2 * 3 * WIDTH).reshape(2, 3, WIDTH),)


def tokens_BT() -> tuple[Tensor, ...]:
    return (torch.arange(6).reshape(2, 3),)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


# ---- containers


class Block(nn.Module):
    """A residual block with dropout, so that the random state counts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH), nn.Dropout(0.5))

    def forward(self, x_BTD: Tensor, scale: float = 1.0) -> Tensor:
        return x_BTD + scale * self.mlp(self.norm(x_BTD))


def blocks() -> nn.Module:
    return nn.Sequential(Block(), Block(), Block())


class Nested(nn.Module):
    """Lists in dicts in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.ModuleDict({"a": linear(), "b": nn.ModuleList([linear(), nn.Tanh()])}) for _ in range(2)]
        )
        self.empty = nn.ModuleList()
        self.missing = None
        self.register_module("absent", None)

    def forward(self, x_BTD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BTD = layer["a"](x_BTD)
            for one in layer["b"]:
                x_BTD = one(x_BTD)
        return x_BTD


class Bare(nn.Module):
    """No children: a parameter and buffers of every kind on the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))
        self.register_buffer("position", torch.arange(WIDTH) / 8, persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("phase", torch.tensor([1j, 2.0]))
        self.register_buffer("nothing", None)
        self.register_parameter("bias", None)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD * self.weight * self.scale + self.position * self.count


class Nothing(nn.Module):
    """No children, no tensors."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.sin()


class Listed(nn.Module):
    """Parameters in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([torch.randn(WIDTH) for _ in range(3)])
        self.named = nn.ParameterDict({"scale": torch.randn(WIDTH), "shift": torch.randn(WIDTH)})

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD * sum(self.several) * self.named["scale"] + self.named["shift"]


# ---- aliases and ties


class Aliased(nn.Module):
    """One module under two names, at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.second = self.first
        self.deep = nn.ModuleDict({"third": self.first, "other": linear()})

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.deep["other"](self.second(self.first(x_BTD))) + self.deep["third"](x_BTD)


class SharedContainer(nn.Module):
    """A whole container under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(linear(), nn.ReLU(), linear())
        self.decoder = self.encoder

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.decoder(self.encoder(x_BTD))


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, WIDTH)
        self.block = Block()
        self.lm_head = nn.Linear(WIDTH, 7, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.lm_head(self.block(self.wte(tokens_BT)))


# ---- hooks


def add_one(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg + 1 for arg in args)


def double_scale(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "scale": 2.0}


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def shift_by_scale(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor:
    return output + kwargs.get("scale", 0.0)


def always(module: nn.Module, args: Any, output: Tensor) -> None:
    return None


def triple_gradient(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    return tuple(None if one is None else one * 3 for one in grad_input)


def halve_gradient(module: nn.Module, grad_output: Any) -> Any:
    return tuple(one / 2 for one in grad_output)


def note_prefix(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    module.saved_as = prefix


def same_dict(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    state[prefix + "extra"] = torch.ones(1)


def drop_extra(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
    state.pop(prefix + "extra", None)


def after_load(module: nn.Module, keys: Any) -> None:
    module.loaded = True


class Counting:
    """A hook that is an object and knows its module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        assert module is self.module, "the hook of a copy belongs to the copy"
        return output + 1


class Hooked(nn.Module):
    """Hooks of every kind, on the root and on a child.

    The root is not among its places: torch 2.13, by hand as well, loses the gradients of full backward hooks on a
    checkpointed child of a compiled module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = linear()
        for module in (self, self.block):
            module.register_forward_pre_hook(add_one)
            module.register_forward_hook(double)
            module.register_forward_hook(always, always_call=True)
            module.register_full_backward_hook(triple_gradient)
            module.register_full_backward_pre_hook(halve_gradient)
            module.register_state_dict_pre_hook(note_prefix)
            module.register_state_dict_post_hook(same_dict)
            module.register_load_state_dict_pre_hook(drop_extra)
            module.register_load_state_dict_post_hook(after_load)
        self.block.register_forward_pre_hook(double_scale, with_kwargs=True, prepend=True)
        self.block.register_forward_hook(shift_by_scale, with_kwargs=True)
        self.head.register_forward_hook(Counting(self.head))
        self.head.register_forward_hook(self.see)

    def see(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen = tuple(output.shape)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.head(self.block(x_BTD))


# ---- forwards set on the instance


def scaled_forward(module: nn.Module, x_BTD: Tensor) -> Tensor:
    return type(module).forward(module, x_BTD) * 3


def patched_by_method() -> nn.Module:
    net = nn.Sequential(linear(), nn.Tanh(), linear())
    net[0].forward = types.MethodType(scaled_forward, net[0])
    net.forward = types.MethodType(scaled_forward, net)
    return net


def patched_by_partial() -> nn.Module:
    net = nn.Sequential(linear(), nn.Tanh(), linear())
    net[0].forward = functools.update_wrapper(functools.partial(scaled_forward, net[0]), net[0].forward)
    net[0]._old_forward = net[0].forward.__wrapped__
    return net


# ---- parametrisations


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def parametrised() -> nn.Module:
    net = nn.Sequential(linear(), nn.Tanh(), linear())
    parametrize.register_parametrization(net[0], "weight", Symmetric())
    return net


def weight_normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(linear()), nn.Tanh(), linear())


def weight_normed_of_old() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn_utils.weight_norm(linear()), nn.Tanh(), linear())


def spectral_normed_of_old() -> nn.Module:
    return nn.Sequential(nn_utils.spectral_norm(linear()), nn.Tanh(), linear())


# ---- modules with a state of their own


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), nn.LazyBatchNorm1d())


class Remembering(nn.Module):
    """Keeps what came out, a tensor with a graph, on attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = linear()
        self.last: Tensor | None = None
        self.history: list[Any] = []

    def forward(self, x_BTD: Tensor) -> Tensor:
        out_BTD = self.body(x_BTD)
        self.last = out_BTD
        self.history.append({"out": out_BTD})
        return out_BTD


def just_run() -> nn.Module:
    net = nn.Sequential(Remembering(), nn.Tanh())
    net(*x_BTD()).sum().backward()
    return net


class Norm(nn.BatchNorm1d):
    """A BatchNorm with a forward of its own."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return super().forward(x_BTD.mT).mT


def normed() -> nn.Module:
    return nn.Sequential(linear(), Norm(WIDTH), nn.Tanh(), Norm(WIDTH, momentum=None))


def half_frozen() -> nn.Module:
    net = nn.Sequential(Block(), Block(), linear())
    net[0].requires_grad_(False)
    net[0].eval()
    net[1].mlp[0].weight.requires_grad_(False)
    net[1].mlp[3].eval()
    return net


class Recurrent(nn.Module):
    """An LSTM: it keeps its parameters in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = linear()

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.head(self.rnn(x_BTD)[0])


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.1, batch_first=True)


def traced() -> nn.Module:
    return nn.Sequential(fx.symbolic_trace(nn.Sequential(linear(), nn.Tanh(), linear())), linear())


# ---- names and attributes


class Hostile(nn.Module):
    """Names that collide with paths, with digits, and with words of nn.Module."""

    NAMES = ("0", "a.b", "10", "output", "module", "forward", "a b", "é", "*", "[0]")

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            self._modules[name] = linear()

    def forward(self, x_BTD: Tensor) -> Tensor:
        for name in self.NAMES:
            x_BTD = x_BTD + self._modules[name](x_BTD)
        return x_BTD


class Delegating(nn.Module):
    """Looks every unknown attribute up in its inner module, as adapters do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["inner"], name)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.inner(x_BTD) * self.in_features


def delegating() -> nn.Module:
    return nn.Sequential(Delegating(linear()), nn.Tanh(), linear())


class Referring(nn.Module):
    """Refers to its children by plain attributes of every kind, and runs through them."""

    def __init__(self) -> None:
        super().__init__()
        self.one = linear()
        self.two = linear()
        self.three = linear()
        self.four = nn.Tanh()
        self.in_list = [self.one]
        self.in_dict = {"deep": ({"two": self.two},)}
        self.weak = weakref.ref(self.three)
        self.method = self.four.forward
        self.scales = {self.one: 2.0}

    def forward(self, x_BTD: Tensor) -> Tensor:
        out = self.in_list[0](x_BTD) * self.scales[self.one]
        out = self.in_dict["deep"][0]["two"](out)
        return self.method(self.weak()(out))


class Gathered(NamedTuple):
    hidden: Tensor
    extra: dict[str, Tensor]


class Structured(nn.Module):
    """Takes keywords, some of which `torch.utils.checkpoint.checkpoint` has too, and gives a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.body = linear()

    def forward(self, x_BTD: Tensor, *, debug: bool = False, function: float = 1.0, context_fn: Any = None) -> Gathered:
        hidden = self.body(x_BTD) * function
        return Gathered(hidden, {"debug": hidden + 1 if debug else hidden})


class Calling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Structured()

    def forward(self, x_BTD: Tensor) -> Any:
        return self.body(x_BTD, debug=True, function=2.0)


MODELS = (
    Model("blocks", blocks, x_BTD, "*", "*.mlp.{0,2}"),
    Model("nested", Nested, x_BTD, "layers.**.[0:1]", "layers.*.a"),
    Model("bare", Bare, x_BTD, ""),
    Model("nothing", Nothing, x_BTD, ""),
    Model("listed", Listed, x_BTD, ""),
    Model("aliased", Aliased, x_BTD, ["second", "deep.other"], "**"),
    Model("shared container", SharedContainer, x_BTD, ["decoder", "encoder.0"], "**"),
    Model("tied", Tied, tokens_BT, ["wte", "lm_head", "block"], "block.mlp.{0,2}"),
    Model("hooked", Hooked, x_BTD, ["block", "head"], "block.mlp.{0,2}"),
    Model("patched by method", patched_by_method, x_BTD, ["", "*"], "2"),
    Model("patched by partial", patched_by_partial, x_BTD, ["", "*"], "2"),
    Model("parametrised", parametrised, x_BTD, "*", "2"),
    Model("weight norm", weight_normed, x_BTD, "*", "2"),
    Model("old weight norm", weight_normed_of_old, x_BTD, "*", "2"),
    Model("old spectral norm", spectral_normed_of_old, x_BTD, "*", "2"),
    Model("lazy", lazy, lambda: (torch.linspace(-1, 1, 10).reshape(2, 5),), "*", lazy=True),
    Model("just run", just_run, x_BTD, "*", "0.body"),
    Model("batch norm", normed, x_BTD, "*", "0"),
    Model("half frozen", half_frozen, x_BTD, "*", "0.mlp.{0,2}"),
    Model("recurrent", Recurrent, x_BTD, "*", "head"),
    Model("attention", attention, x_BTD, ["self_attn", "norm1", "linear1"], "linear{1,2}"),
    Model("traced", traced, x_BTD, ["*", "0.0"], "1"),
    Model("hostile names", Hostile, x_BTD, "**", "{0,a.b,10,output,module,forward,a b,é}"),
    Model("delegating", delegating, x_BTD, ["*", "0.inner"], "2"),
    Model("referring", Referring, x_BTD, ["", "one", "two", "three"], "{one,two,three}"),
    Model("structured", Calling, x_BTD, ["", "body"], "body.body"),
)
