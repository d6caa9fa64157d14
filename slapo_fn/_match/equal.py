"""What counts as the same operation: one table, and how a call is bound to it.

Each row is an operation: its parameters, and the ways in which it is spelled. A call is read by binding its arguments to the
row's parameters, so positional or keyword, a default written out or left out, a module's attribute or a function's argument
make no difference: ``softmax(x, 1)``, ``F.softmax(x, dim=1)``, ``x.softmax(1)`` and ``nn.Softmax(1)(x)`` are one and the same.

F.gelu  torch.add  operator.add   functions              .view   a method              @shape   an attribute
aten.add.Tensor                   torch.export's         nn.GELU(…)                    a module; what its forward is not given
(…) after a spelling              parameters of its own  it has as an attribute of the parameter's name

* A row's ``~`` names two parameters that may change places; ``alias`` says that the result may be a view of what went in, and
  ``cheap`` that it tells about a tensor (its size, its dtype) and computes nothing.
* ``x.relu_()``, ``operator.iadd`` and ``inplace=True`` are the plain operation where nobody else can see what they write. Where
  somebody might (the tensor comes from outside, has another user, or may be a view), they equal nothing.
* A dim is compared as it is written, ``-1`` is not ``1``; one number for a stride is a tuple of it; ``view`` is not ``reshape``.
* ``nn.Identity`` is an operation, and no other; a module of a class that has no row equals those of its class and config.
* A function that has no row equals itself; the arguments are bound by its signature, or by the schema where it is torch's own.
  ``x.cumsum(0)`` is ``torch.cumsum(x, 0)``.
"""

from __future__ import annotations

import re

CONV = "input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1"
MAX_POOL = "input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False"
AVG_POOL = "input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True"
TABLE = f"""
relu                | input | F.relu torch.relu .relu nn.ReLU aten.relu
gelu                | input, approximate='none' | F.gelu nn.GELU aten.gelu
silu                | input | F.silu nn.SiLU aten.silu
sigmoid             | input | torch.sigmoid .sigmoid torch.special.expit nn.Sigmoid aten.sigmoid
tanh                | input | torch.tanh .tanh nn.Tanh aten.tanh
softmax             | input, dim, dtype=None | F.softmax torch.softmax .softmax nn.Softmax aten.softmax.int
                      aten._softmax
log_softmax         | input, dim, dtype=None | F.log_softmax torch.log_softmax .log_softmax nn.LogSoftmax
                      aten.log_softmax.int aten._log_softmax
elu                 | input, alpha=1.0 | F.elu nn.ELU aten.elu
selu                | input | F.selu torch.selu nn.SELU aten.selu
celu                | input, alpha=1.0 | F.celu torch.celu nn.CELU aten.celu
leaky_relu          | input, negative_slope=0.01 | F.leaky_relu nn.LeakyReLU aten.leaky_relu
hardtanh            | input, min_val=-1.0, max_val=1.0 | F.hardtanh nn.Hardtanh aten.hardtanh F.relu6(input,
                      min_val=0, max_val=6) nn.ReLU6 aten.relu6(input, min_val=0, max_val=6)
hardswish           | input | F.hardswish nn.Hardswish aten.hardswish
hardsigmoid         | input | F.hardsigmoid nn.Hardsigmoid aten.hardsigmoid
mish                | input | F.mish nn.Mish aten.mish
softplus            | input, beta=1.0, threshold=20.0 | F.softplus nn.Softplus aten.softplus
logsigmoid          | input | F.logsigmoid nn.LogSigmoid aten.log_sigmoid
glu                 | input, dim=-1 | F.glu nn.GLU aten.glu
dropout             | input, p=0.5, training=True | F.dropout torch.dropout(input, p, train) nn.Dropout aten.dropout |
                      alias
identity            | input | nn.Identity | alias
linear              | input, weight, bias=None | F.linear nn.Linear aten.linear
embedding           | input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False,
                      sparse=False | F.embedding torch.embedding(weight, input, padding_idx=-1,
                      scale_grad_by_freq=False, sparse=False) nn.Embedding aten.embedding
layer_norm          | input, normalized_shape, weight=None, bias=None, eps=1e-5 | F.layer_norm torch.layer_norm
                      nn.LayerNorm aten.layer_norm
rms_norm            | input, normalized_shape, weight=None, eps=None | F.rms_norm torch.rms_norm nn.RMSNorm
                      aten.rms_norm
group_norm          | input, num_groups, weight=None, bias=None, eps=1e-5 | F.group_norm torch.group_norm nn.GroupNorm
                      aten.group_norm
batch_norm          | input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
                      | F.batch_norm torch.batch_norm(input, weight, bias, running_mean, running_var, training,
                      momentum, eps, cudnn_enabled) nn.BatchNorm1d nn.BatchNorm2d nn.BatchNorm3d aten.batch_norm
instance_norm       | input, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True,
                      momentum=0.1, eps=1e-5 | F.instance_norm nn.InstanceNorm1d nn.InstanceNorm2d nn.InstanceNorm3d
                      aten.instance_norm
conv1d              | {CONV} | F.conv1d nn.Conv1d aten.conv1d aten.conv1d.padding
conv2d              | {CONV} | F.conv2d nn.Conv2d aten.conv2d aten.conv2d.padding
conv3d              | {CONV} | F.conv3d nn.Conv3d aten.conv3d aten.conv3d.padding
max_pool1d          | {MAX_POOL}, return_indices=False | F.max_pool1d torch.max_pool1d F.max_pool1d_with_indices
                      nn.MaxPool1d aten.max_pool1d
max_pool2d          | {MAX_POOL}, return_indices=False | F.max_pool2d torch.max_pool2d F.max_pool2d_with_indices
                      nn.MaxPool2d aten.max_pool2d
max_pool3d          | {MAX_POOL}, return_indices=False | F.max_pool3d torch.max_pool3d F.max_pool3d_with_indices
                      nn.MaxPool3d aten.max_pool3d
avg_pool1d          | {AVG_POOL} | F.avg_pool1d nn.AvgPool1d aten.avg_pool1d
avg_pool2d          | {AVG_POOL}, divisor_override=None | F.avg_pool2d nn.AvgPool2d aten.avg_pool2d
avg_pool3d          | {AVG_POOL}, divisor_override=None | F.avg_pool3d nn.AvgPool3d aten.avg_pool3d
adaptive_avg_pool1d | input, output_size | F.adaptive_avg_pool1d nn.AdaptiveAvgPool1d aten.adaptive_avg_pool1d
adaptive_avg_pool2d | input, output_size | F.adaptive_avg_pool2d nn.AdaptiveAvgPool2d aten.adaptive_avg_pool2d
adaptive_avg_pool3d | input, output_size | F.adaptive_avg_pool3d nn.AdaptiveAvgPool3d aten.adaptive_avg_pool3d
adaptive_max_pool1d | input, output_size, return_indices=False | F.adaptive_max_pool1d nn.AdaptiveMaxPool1d
adaptive_max_pool2d | input, output_size, return_indices=False | F.adaptive_max_pool2d nn.AdaptiveMaxPool2d
mse_loss            | input, target, reduction='mean', weight=None | F.mse_loss nn.MSELoss
l1_loss             | input, target, reduction='mean', weight=None | F.l1_loss nn.L1Loss
cross_entropy       | input, target, weight=None, ignore_index=-100, reduction='mean', label_smoothing=0.0 |
                      F.cross_entropy nn.CrossEntropyLoss
attention           | query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
                      | F.scaled_dot_product_attention aten.scaled_dot_product_attention
matmul              | input, other | operator.matmul torch.matmul .matmul aten.matmul
bmm                 | input, mat2 | torch.bmm .bmm aten.bmm
add                 | input, other, alpha=1 | operator.add torch.add .add aten.add.Tensor aten.add.Scalar | ~input
                      other
sub                 | input, other, alpha=1 | operator.sub torch.sub torch.subtract .sub .subtract aten.sub.Tensor
                      aten.sub.Scalar torch.rsub(other, input, alpha=1) aten.rsub.Tensor(other, input, alpha=1)
                      aten.rsub.Scalar(other, input, alpha=1)
mul                 | input, other | operator.mul torch.mul torch.multiply .mul .multiply aten.mul.Tensor
                      aten.mul.Scalar | ~input other
div                 | input, other, rounding_mode=None | operator.truediv torch.div torch.true_divide torch.divide
                      .div .divide .true_divide aten.div.Tensor aten.div.Scalar aten.div.Tensor_mode
floor_divide        | input, other | operator.floordiv torch.floor_divide .floor_divide aten.floor_divide
remainder           | input, other | operator.mod torch.remainder .remainder aten.remainder.Tensor
                      aten.remainder.Scalar
pow                 | input, exponent | operator.pow torch.pow .pow aten.pow.Tensor_Scalar aten.pow.Tensor_Tensor
                      aten.pow.Scalar
neg                 | input | operator.neg torch.neg torch.negative .neg .negative aten.neg
and                 | input, other | operator.and_ torch.bitwise_and .bitwise_and aten.bitwise_and.Tensor | ~input
                      other
or                  | input, other | operator.or_ torch.bitwise_or .bitwise_or aten.bitwise_or.Tensor | ~input other
xor                 | input, other | operator.xor torch.bitwise_xor .bitwise_xor aten.bitwise_xor.Tensor | ~input
                      other
logical_and         | input, other | torch.logical_and .logical_and aten.logical_and | ~input other
logical_or          | input, other | torch.logical_or .logical_or aten.logical_or | ~input other
invert              | input | operator.invert torch.bitwise_not .bitwise_not aten.bitwise_not
eq                  | input, other | operator.eq torch.eq .eq aten.eq.Tensor aten.eq.Scalar | ~input other
ne                  | input, other | operator.ne torch.ne torch.not_equal .ne aten.ne.Tensor aten.ne.Scalar | ~input
                      other
lt                  | input, other | operator.lt torch.lt torch.less .lt .less aten.lt.Tensor aten.lt.Scalar
                      operator.gt(other, input) torch.gt(other, input) torch.greater(other, input) .gt(other, input)
                      .greater(other, input) aten.gt.Tensor(other, input) aten.gt.Scalar(other, input)
le                  | input, other | operator.le torch.le torch.less_equal .le aten.le.Tensor aten.le.Scalar
                      operator.ge(other, input) torch.ge(other, input) torch.greater_equal(other, input) .ge(other,
                      input) aten.ge.Tensor(other, input) aten.ge.Scalar(other, input)
maximum             | input, other | torch.maximum .maximum aten.maximum | ~input other
minimum             | input, other | torch.minimum .minimum aten.minimum | ~input other
clamp               | input, min=None, max=None | torch.clamp torch.clip .clamp .clip aten.clamp
where               | condition, input, other | torch.where aten.where.self
masked_fill         | input, mask, value | torch.masked_fill .masked_fill aten.masked_fill.Scalar
                      aten.masked_fill.Tensor
mean                | input, dim=None, keepdim=False, dtype=None | torch.mean .mean aten.mean.dim aten.mean(input,
                      dtype=None)
sum                 | input, dim=None, keepdim=False, dtype=None | torch.sum .sum aten.sum.dim_IntList aten.sum(input,
                      dtype=None)
view                | input, *shape | .view aten.view(input, shape) | alias
reshape             | input, *shape | .reshape torch.reshape(input, shape) aten.reshape(input, shape) | alias
permute             | input, *dims | .permute torch.permute(input, dims) aten.permute(input, dims) | alias
transpose           | input, dim0, dim1 | .transpose torch.transpose .swapaxes .swapdims torch.swapaxes torch.swapdims
                      aten.transpose.int | ~dim0 dim1 alias
flatten             | input, start_dim=0, end_dim=-1 | torch.flatten .flatten nn.Flatten aten.flatten.using_ints |
                      alias
unsqueeze           | input, dim | torch.unsqueeze .unsqueeze aten.unsqueeze | alias
squeeze             | input, dim=None | torch.squeeze .squeeze aten.squeeze.dim aten.squeeze.dims aten.squeeze(input)
                      | alias
expand              | input, *size | .expand aten.expand(input, size, implicit=False) | alias
repeat              | input, *repeats | .repeat aten.repeat(input, repeats)
cat                 | tensors, dim=0 | torch.cat torch.concat torch.concatenate aten.cat
stack               | tensors, dim=0 | torch.stack aten.stack
chunk               | input, chunks, dim=0 | torch.chunk .chunk aten.chunk | alias
split               | input, split_size, dim=0 | torch.split(input, split_size, dim=0) .split aten.split.Tensor(input,
                      split_size, dim=0) aten.split_with_sizes(input, split_size, dim=0) aten.split.sizes(input,
                      split_size, dim=0) | alias
getitem             | input, index | operator.getitem | alias
contiguous          | input, memory_format=None | .contiguous aten.contiguous | alias
to                  | input, dtype=None, device=None, copy=False, memory_format=None, non_blocking=False | .to(input,
                      dtype=None, device=None, copy=False, memory_format=None, non_blocking=False) .float(input,
                      dtype=float32) .half(input, dtype=float16) .bfloat16(input, dtype=bfloat16) .double(input,
                      dtype=float64) .type(input, dtype) aten.to.dtype(input, dtype, non_blocking=False, copy=False,
                      memory_format=None) | alias
size                | input, dim=None | .size @shape(input) aten.sym_size.int | cheap
ndim                | input | .dim .ndimension @ndim | cheap
numel               | input | torch.numel .numel aten.sym_numel | cheap
dtype               | input | @dtype | cheap
device              | input | @device | cheap
asserts             | a, size=None, stride=None, dtype=None, device=None, layout=None | aten._assert_tensor_metadata |
                      cheap
exp                 | input | torch.exp .exp aten.exp
exp2                | input | torch.exp2 .exp2 aten.exp2
expm1               | input | torch.expm1 .expm1 aten.expm1
log                 | input | torch.log .log aten.log
log2                | input | torch.log2 .log2 aten.log2
log10               | input | torch.log10 .log10 aten.log10
log1p               | input | torch.log1p .log1p aten.log1p
sqrt                | input | torch.sqrt .sqrt aten.sqrt
rsqrt               | input | torch.rsqrt .rsqrt aten.rsqrt
abs                 | input | torch.abs .abs aten.abs
square              | input | torch.square .square aten.square
reciprocal          | input | torch.reciprocal .reciprocal aten.reciprocal
sign                | input | torch.sign .sign aten.sign
erf                 | input | torch.erf .erf aten.erf
erfc                | input | torch.erfc .erfc aten.erfc
sin                 | input | torch.sin .sin aten.sin
cos                 | input | torch.cos .cos aten.cos
tan                 | input | torch.tan .tan aten.tan
sinh                | input | torch.sinh .sinh aten.sinh
cosh                | input | torch.cosh .cosh aten.cosh
asin                | input | torch.asin .asin aten.asin
acos                | input | torch.acos .acos aten.acos
atan                | input | torch.atan .atan aten.atan
floor               | input | torch.floor .floor aten.floor
ceil                | input | torch.ceil .ceil aten.ceil
round               | input | torch.round .round aten.round
trunc               | input | torch.trunc .trunc aten.trunc
logical_not         | input | torch.logical_not .logical_not aten.logical_not
isnan               | input | torch.isnan .isnan aten.isnan
isinf               | input | torch.isinf .isinf aten.isinf
"""
SPELLING = re.compile(r"[\w.@]+(?:\([^)]*\))?")


def rows() -> list[list[str]]:
    """The table's cells: name, parameters, spellings, flags. A line that begins with a blank goes on with the row above."""
    lines = re.sub(r"\n +", " ", TABLE.strip()).splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [row if len(row) == 4 else [*row, ""] for row in cells]


def table() -> list[tuple[str, str, tuple[str, ...]]]:
    """The table, for people: each operation's name, its parameters, and its spellings.

    Example:
        >>> table()[0]
        ('relu', 'input', ('F.relu', 'torch.relu', '.relu', 'nn.ReLU', 'aten.relu'))
    """
    return [(name, parameters, tuple(SPELLING.findall(spellings))) for name, parameters, spellings, _ in rows()]
