"""Replacement modules: torch only, and each of use with no schedule at all."""

from __future__ import annotations

from .activations import XIELU as XIELU
from .activations import Formula as Formula
from .activations import activation as activation
from .attention import Attention as Attention
from .attention import attend as attend
from .conv import fold_conv_bn as fold_conv_bn
from .function import Function as Function
from .hf_attention import HFAttention as HFAttention
from .linear import FusedLinear as FusedLinear
from .linear import LinearActivation as LinearActivation
from .linear import LinearWithSeparateBias as LinearWithSeparateBias
from .loss import LinearCrossEntropy as LinearCrossEntropy
from .loss import linear_cross_entropy as linear_cross_entropy
from .mlp import FusedMLP as FusedMLP
from .mlp import GatedMLP as GatedMLP
from .norm import BiasDropoutResidualNorm as BiasDropoutResidualNorm
from .qkv import FusedQKV as FusedQKV
