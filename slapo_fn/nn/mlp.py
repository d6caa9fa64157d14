"""The feed-forward part of a transformer block, plain or gated.

c_proj(act(c_fc(x)))                     ->   FusedMLP:  fc_out(activation(fc_in(x)))
down_proj(act(gate_proj(x)) * up_proj(x))   ->   GatedMLP:  gate and up in one matmul

B batch, T tokens, D hidden size, F intermediate size
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._layout.sources import Source, WeightMap
from ..errors import MisfitError
from ._fill import as_linear, below, fill, fused, parts, sizes
from .activations import Activation, placed
from .linear import FusedLinear


class FusedMLP(nn.Module):
    """Compute linear, activation, linear and, in training, dropout; written so that a compiler fuses all between matmuls.

    Args:
        hidden: The size of the input and the output, D.
        intermediate: The size between the two, F.
        activation: The activation, by name, as a function or as a module.
        bias: Whether the two layers have a bias.
        dropout: The share of the output that is dropped in training.
        activation_dropout: The share of the activations that is dropped in training.
        device: Where its tensors are.
        dtype: What they are.

    Example:
        >>> FusedMLP(4, 16, "gelu_new")(torch.zeros(2, 3, 4)).shape
        torch.Size([2, 3, 4])
    """

    activation: nn.Module
    weight_map: WeightMap | None = None

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        activation: Activation = "gelu",
        *,
        bias: bool = True,
        dropout: float = 0.0,
        activation_dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.fc_in: nn.Module = nn.Linear(hidden, intermediate, bias, device=device, dtype=dtype)
        self.activation = placed(activation, _weight(self.fc_in))
        self.activation_dropout: nn.Module = nn.Dropout(activation_dropout)
        self.fc_out: nn.Module = nn.Linear(intermediate, hidden, bias, device=device, dtype=dtype)
        self.dropout: nn.Module = nn.Dropout(dropout)

    @classmethod
    def from_gpt2(cls, mlp: nn.Module) -> FusedMLP:
        """Take over GPT-2's MLP: its weights, activation, dropout, mode, dtype, device and frozenness.

        Args:
            mlp: A module with ``c_fc``, ``c_proj``, ``act`` and ``dropout``, as transformers' ``GPT2MLP``.

        Returns:
            The MLP. Weights that lie transposed are copied; all else is the very same.

        Raises:
            MisfitError: It is made of other parts.
        """
        c_fc, c_proj, act, dropout = parts(mlp, ("c_fc", "c_proj", "act", "dropout"), "GPT-2's MLP")
        made = cls(1, 1, act, device="meta")
        made.fc_in, fc_in = as_linear(c_fc, "c_fc")
        made.fc_out, fc_out = as_linear(c_proj, "c_proj")
        made.dropout = dropout
        return fill(made, {"": mlp}, {**below("fc_in", fc_in), **below("fc_out", fc_out)})

    @classmethod
    def from_t5(cls, mlp: nn.Module) -> FusedMLP:
        """Take over T5's MLP without a gate: all its parts, the very same, under other names.

        Args:
            mlp: A module with ``wi``, ``wo``, ``dropout`` and ``act``, as transformers' ``T5DenseActDense``.

        Returns:
            The MLP.

        Raises:
            MisfitError: It is made of other parts, or ``wo`` is kept in another dtype.
        """
        wi, wo, dropout, act = parts(mlp, ("wi", "wo", "dropout", "act"), "T5's MLP")
        _refuse_mixed(wi, wo)
        made = cls(1, 1, act, device="meta")
        made.fc_in, fc_in = as_linear(wi, "wi")
        made.fc_out, fc_out = as_linear(wo, "wo")
        made.activation_dropout = dropout
        return fill(made, {"": mlp}, {**below("fc_in", fc_in), **below("fc_out", fc_out)})

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Compute the MLP: x_BTD to the same shape."""
        inner_BTF = dropped(self.activation(self.fc_in(x_BTD)), self.activation_dropout)
        return dropped(self.fc_out(inner_BTF), self.dropout)


class GatedMLP(nn.Module):
    """Compute a gated MLP, SwiGLU and its kin (https://arxiv.org/abs/2002.05202), with gate and up in one matmul.

    Args:
        hidden: The size of the input and the output, D.
        intermediate: The size between the two, F.
        activation: The gate's activation, by name, as a function or as a module.
        bias: Whether the layers have a bias.
        dropout: The share of the output that is dropped in training.
        activation_dropout: The share of the gated activations that is dropped in training.
        device: Where its tensors are.
        dtype: What they are.

    Example:
        >>> GatedMLP(4, 16)(torch.zeros(2, 3, 4)).shape
        torch.Size([2, 3, 4])
    """

    gate_up: FusedLinear
    activation: nn.Module
    weight_map: WeightMap | None = None

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        activation: Activation = "silu",
        *,
        bias: bool = False,
        dropout: float = 0.0,
        activation_dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_up = FusedLinear(hidden, (intermediate, intermediate), bias, device=device, dtype=dtype)
        self.activation = placed(activation, self.gate_up.weight)
        self.activation_dropout: nn.Module = nn.Dropout(activation_dropout)
        self.down: nn.Module = nn.Linear(intermediate, hidden, bias, device=device, dtype=dtype)
        self.dropout: nn.Module = nn.Dropout(dropout)

    @classmethod
    def from_llama(cls, mlp: nn.Module) -> GatedMLP:
        """Take over Llama's MLP: its weights, activation, mode, dtype, device and frozenness.

        Args:
            mlp: A module with ``gate_proj``, ``up_proj``, ``down_proj`` and ``act_fn``, as transformers' ``LlamaMLP``,
                and those of Mistral, Qwen and Gemma.

        Returns:
            The MLP. The weights of gate and up are copied, one above the other; ``down`` is the very same module.

        Raises:
            MisfitError: It is made of other parts, or gate and up differ.
        """
        names = ("gate_proj", "up_proj", "down_proj", "act_fn")
        gate, up, down, act = parts(mlp, names, "Llama's MLP")
        made, sources = _gated({"gate_proj": gate, "up_proj": up}, ("down_proj", down), act)
        return fill(made, {"": mlp}, sources)

    @classmethod
    def from_t5(cls, mlp: nn.Module) -> GatedMLP:
        """Take over T5's gated MLP.

        Args:
            mlp: A module with ``wi_0``, ``wi_1``, ``wo``, ``dropout`` and ``act``, as transformers'
                ``T5DenseGatedActDense``.

        Returns:
            The MLP. The weights of ``wi_0`` and ``wi_1`` are copied, one above the other; ``wo`` is the very same.

        Raises:
            MisfitError: It is made of other parts, or ``wo`` is kept in another dtype.
        """
        gate, up, wo, dropout, act = parts(mlp, ("wi_0", "wi_1", "wo", "dropout", "act"), "T5's gated MLP")
        _refuse_mixed(gate, wo)
        made, sources = _gated({"wi_0": gate, "wi_1": up}, ("wo", wo), act)
        made.activation_dropout = dropout
        return fill(made, {"": mlp}, sources)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Compute the MLP: x_BTD to the same shape."""
        gate_BTF, up_BTF = self.gate_up(x_BTD)
        inner_BTF = dropped(self.activation(gate_BTF) * up_BTF, self.activation_dropout)
        return dropped(self.down(inner_BTF), self.dropout)


def _gated(
    layers: dict[str, nn.Module], down: tuple[str, nn.Module], act: nn.Module
) -> tuple[GatedMLP, dict[str, Source]]:
    hidden, (intermediate, other), fused_sources = fused(layers)
    if intermediate != other:
        raise MisfitError(f"{' and '.join(layers)} give as much, not {intermediate} and {other}", layers)
    made = GatedMLP(hidden, intermediate, act, bias="bias" in fused_sources, device="meta")
    made.down, down_sources = as_linear(down[1], down[0])
    return made, {**below("gate_up", fused_sources), **below("down", down_sources)}


def _weight(layer: nn.Module) -> Tensor:
    return layer.get_parameter("weight")


def _refuse_mixed(wi: nn.Module, wo: nn.Module) -> None:
    for name, layer in (("wi", wi), ("wo", wo)):
        sizes(layer, name)
    if _weight(wi).dtype != _weight(wo).dtype:
        raise MisfitError(f"wo is kept in {_weight(wo).dtype} and wi in {_weight(wi).dtype}; cast the MLP to one first")


def dropped(x: Tensor, dropout: nn.Module) -> Tensor:
    """Drop out, and call nothing where nothing is dropped."""
    made: Tensor = dropout(x) if getattr(dropout, "p", True) else x
    return made
