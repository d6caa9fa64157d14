"""The tracer of one forward: `torch.fx`'s own, with what that leaves to luck made right.

Training flags, buffers and what is drawn at random are looked up at each call, and are no constants of the graph.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportPrivateUsage=false
# fx's tracer has no types.

from __future__ import annotations

import dataclasses
import dis
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx._symbolic_trace import _patch_function  # lets *args and **kwargs be one value each
from torch.overrides import TorchFunctionMode

from .._find import find
from .._glob import parse
from .._inherit import has_hooks
from .._rules import fits
from ..errors import TraceError
from .program import Program
from .traced import Traced
from .values import Value, fixed, not_none
from .watch import Refusal, here, place, set_profile
from .writes import state_of

LEAF = "draw no code of it in: leaves=…, or trace the modules inside it"
MAKES_NEW = """arange bartlett_window empty empty_strided eye full hann_window linspace logspace normal ones rand randint
    randn randperm tensor tril_indices triu_indices zeros"""
FACTORIES = frozenset(getattr(torch, name) for name in MAKES_NEW.split())


class Settings(NamedTuple):
    """How a forward is traced.

    Attributes:
        depth: How many levels of children are drawn in; None for all.
        leaves: Patterns and classes of modules that are not drawn in.
        constants: Arguments that are fixed, by name.
        tracer: A tracer of the user's own.
    """

    depth: int | None = 0
    leaves: tuple[str | type[nn.Module], ...] = ()
    constants: tuple[tuple[str, Any], ...] = ()
    tracer: type[fx.Tracer] | None = None


class AsksMode(BaseException):
    """The forward asks in a condition whether it is in training; no ``except Exception`` of its own is to catch it."""


class ForwardTracer(fx.Tracer):
    """Traces one forward, in training, in evaluation, or in both at once where it never asks."""

    proxy_buffer_attributes = True

    def __init__(self, root: nn.Module, settings: Settings, mode: bool | None, known: Program | None) -> None:
        super().__init__()
        self.settings, self.mode, self.program = settings, mode, known
        self.level = 0
        self.inlined: list[str] = []
        self.flags: set[fx.Node] = set()
        self.refused: Refusal | None = None
        self.guarded: dict[fx.Node, str] = {}
        self.before = [(path, module, state_of(module)) for path, module in root.named_modules()]
        self.leaves = {id(found) for leaf in settings.leaves for found in _chosen(root, leaf)}
        self.around = _around()

    # ---- how far it goes

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        depth, own = self.settings.depth, vars(m).get("forward")
        return (
            (depth is not None and self.level >= depth)
            or super().is_leaf_module(m, module_qualified_name)
            or id(m) in self.leaves
            or getattr(type(m), "is_trace_leaf", False)
            or has_hooks(m)
            or (own is not None and not isinstance(own, Traced))
            or isinstance(m, torch.jit.ScriptModule)
        )

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def deeper(*inner: Any, **keywords: Any) -> Any:
            self.inlined.append(self.path_of_module(m))
            self.level += 1
            try:
                return forward(*inner, **keywords)
            finally:
                self.level -= 1

        return super().call_module(m, deeper, args, kwargs)

    def path_of_module(self, mod: nn.Module) -> str:
        path = super().path_of_module(mod)
        found: Any = self.root
        for name in path.split("."):
            found = vars(found)["_modules"].get(name)
            if found is None or not name or hasattr(nn.Module, name):
                raise TraceError(
                    f"it calls {path!r}, whose name code cannot spell: rename that child, or its parent's class"
                )
        return path

    # ---- its arguments

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        if self.program is not None:  # traced already, otherwise, and perhaps edited since
            if len(self.program.functions) > 1 and self.mode is None:
                raise AsksMode
            root_fn = self.program.function(bool(self.mode))
        constants = dict(self.settings.constants)
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        given = [self._argument(one, constants) for one in parameters]
        if constants:
            known = ", ".join(one.name for one in parameters)
            raise TraceError(f"constants names {', '.join(constants)}, and the forward takes {known}")
        self._watch_flags()
        return self._bound(root_fn, parameters, given), []

    def _argument(self, parameter: inspect.Parameter, constants: dict[str, Any]) -> Any:
        star = (
            "*"
            if parameter.kind is parameter.VAR_POSITIONAL
            else "**"
            if parameter.kind is parameter.VAR_KEYWORD
            else ""
        )
        default = () if parameter.default is parameter.empty else (parameter.default,)
        proxy = self.create_proxy("placeholder", star + parameter.name, default, {})
        if parameter.name not in constants:
            return proxy
        value = constants.pop(parameter.name)
        self.create_proxy("call_function", fixed, (proxy, value, parameter.name), {})
        return value

    def _bound(self, function: Any, parameters: list[inspect.Parameter], given: list[Any]) -> Callable[[], Any]:
        keywords: dict[str, Any] = {}
        if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters):
            if hasattr(function, "__wrapped__"):
                code = inspect.unwrap(function).__code__
                raise TraceError(
                    f"{place(code.co_filename, code.co_firstlineno)} is decorated, and takes *args or **kwargs, which the "
                    "decorator would take apart."
                )
            function = _patch_function(function, len(given) + 1)
            stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            pairs = sorted(zip(parameters, given, strict=True), key=lambda pair: pair[0].kind in stars)
            given = [value for _, value in pairs]  # as the code has its variables: keyword-only ones before *args
        else:
            keywords = {o.name: v for o, v in zip(parameters, given, strict=True) if o.kind is o.KEYWORD_ONLY}
            given = [v for o, v in zip(parameters, given, strict=True) if o.kind is not o.KEYWORD_ONLY]

        def run():  # type: ignore[no-untyped-def]  # fx writes an annotation into the code
            with _Factories(self):
                return function(self.root, *given, **keywords)

        return run

    # ---- what is looked up at each call

    def _watch_flags(self) -> None:
        """Let ``module.training`` be a traced value of all modules whose code may be drawn in."""
        self.graph._graph_namespace.create_name("self", None)  # no value is called as the module is in the code
        for path, module, _ in self.before:
            flag = self.graph.get_attr(f"{path}.training" if path else "training")
            vars(module)["training"] = Value(flag, self)
            self.flags.add(flag)

    def known(self, proxy: fx.Proxy) -> Any:
        """The parameter or buffer that a traced value stands for, or None."""
        if proxy.node.op != "get_attr" or proxy.node in self.flags:
            return None
        path, _, name = str(proxy.node.target).rpartition(".")
        owner = self.root.get_submodule(path)
        return owner._parameters.get(name, owner._buffers.get(name))

    def to_bool(self, obj: fx.Proxy) -> bool:
        if obj.node in self.flags:
            if self.mode is None:
                raise AsksMode
            return self.mode
        raise self.refuse("asks a traced value in a condition, and its answer is only known when the model runs.")

    def iter(self, obj: fx.Proxy) -> Any:
        frame = sys._getframe(2)
        before = frame.f_code.co_code[frame.f_lasti]
        if dis.opname[before].startswith("UNPACK_SEQUENCE"):
            return super().iter(obj)
        raise self.refuse("iterates over a traced value, and how many there are is only known when the model runs.")

    def refuse(self, reason: str, way_out: str = "") -> TraceError:
        """Note why this forward is not traced, with the line of the user's; for a forward may catch what is raised."""
        self.refused = self.refused or here(reason, way_out)
        return TraceError(reason)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Value(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _around() != self.around:
            self.refuse("computes under no_grad, autocast or the like, which a graph does not hold.", LEAF)
        return super().create_node(*args, **kwargs)

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        watch = sys.getprofile()  # what fx does to note an operation is no code of the user's, and needs no watching
        sys.setprofile(None)
        try:
            return super().create_proxy(*args, **kwargs)
        finally:
            set_profile(watch)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, dict) and type(a) is not dict:  # transformers' outputs are such
            if not dataclasses.is_dataclass(a):
                raise TraceError(f"it makes a {type(a).__name__}, which a graph does not hold")
            return self.create_node("call_function", type(a), (), {key: self.create_arg(one) for key, one in a.items()})
        return super().create_arg(a)

    # ---- the end

    def finish(self) -> fx.Graph:
        """The graph, without the flags that nothing asks for."""
        for flag in self.flags:
            if not flag.users:
                self.graph.erase_node(flag)
        for node, name in self.guarded.items():
            with self.graph.inserting_after(node):
                self.graph.call_function(not_none, (node, name))
        return self.graph

    def guard(self, node: fx.Node, name: str) -> None:
        """Have it checked at each call that a value is not None, which the forward asks of it."""
        self.guarded.setdefault(node, name)

    def constants(self) -> tuple[tuple[str, Tensor], ...]:
        """Tensors of the forward's that hang on no module."""
        known = {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        held = vars(self.root) if "root" in vars(self) else {}
        return tuple((key, held[key]) for key in known if key.startswith("_tensor_constant") and key in held)

    def written(self) -> Refusal | None:
        """What the forward wrote on its modules, which a graph would not write again."""
        for path, module, state in self.before:
            for key, value in state_of(module).items():
                if key not in state or state[key] != value:
                    name = f"{path}.{key}" if path else key
                    return Refusal(f"its forward writes {name},", "which a graph would not do again.")
        return None


class _Factories(TorchFunctionMode):
    """Records what makes a new tensor, so that it is made, or drawn, anew at each call."""

    def __init__(self, tracer: ForwardTracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FACTORIES:
            return self.tracer.create_proxy("call_function", func, args, kwargs or {})
        if func is torch._C._set_grad_enabled:
            self.tracer.refuse("switches gradients on or off, which a graph does not hold.", LEAF)
        return func(*args, **(kwargs or {}))


def _chosen(root: nn.Module, leaf: str | type[nn.Module]) -> list[nn.Module]:
    if isinstance(leaf, str):
        return [module for _, module in find(root, parse(leaf))]
    return [module for module in root.modules() if fits(module, leaf, False)]


def _around() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
