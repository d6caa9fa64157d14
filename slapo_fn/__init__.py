"""slapo_fn transforms PyTorch models by schedules.

A schedule is an immutable tuple of entries ``(selector, primitive, args)``, built with pure functions and materialised by
one `apply` pass that leaves the given model as it was.

    import slapo_fn as slapo

    sch = slapo.Schedule()
    sch = slapo.replace(sch, slapo.select(model, "**.mlp", GPT2MLP), lambda mlp: FusedMLP(mlp))
    sch = slapo.checkpoint(sch, slapo.select(model, "transformer.h.*")[::2])
    fast = slapo.apply(model, sch)
"""

# By their full names: a relative import would bring in the submodule of the same name beside the function, and an
# editor would go to both.
from slapo_fn._rules import Site as Site
from slapo_fn.apply import apply as apply
from slapo_fn.pattern import calls as calls
from slapo_fn.pattern import parallel as parallel
from slapo_fn.pattern import pattern as pattern
from slapo_fn.plan import Plan as Plan
from slapo_fn.plan import Step as Step
from slapo_fn.plan import plan as plan
from slapo_fn.select import at as at
from slapo_fn.select import exactly as exactly
from slapo_fn.select import optional as optional
from slapo_fn.select import select as select
from slapo_fn.select import where as where
from slapo_fn.selection import Selection as Selection
from slapo_fn.selection import Selector as Selector
from slapo_fn.selection import Target as Target

from . import nn as nn
from ._catalog import Operation as Operation
from ._catalog import Primitive as Primitive
from ._catalog import operations as operations
from ._catalog import primitives as primitives
from ._graph.program import Program as Program
from ._graph.subgraph import Subgraph as Subgraph
from ._graph.tracing import graph_of as graph_of
from ._layout.sources import WeightMap as WeightMap
from ._layout.sources import cat as cat
from ._layout.sources import part as part
from ._layout.sources import transposed as transposed
from ._layout.sources import weight_map as weight_map
from ._match.matcher import call_module as call_module
from ._origin import Origin as Origin
from .errors import ArgumentError as ArgumentError
from .errors import CountError as CountError
from .errors import ForkError as ForkError
from .errors import HookError as HookError
from .errors import MisfitError as MisfitError
from .errors import NoMatchError as NoMatchError
from .errors import ParameterNameError as ParameterNameError
from .errors import PatternError as PatternError
from .errors import ScheduleError as ScheduleError
from .errors import SizeError as SizeError
from .errors import SlapoError as SlapoError
from .errors import TieError as TieError
from .errors import TraceError as TraceError
from .errors import UnsupportedError as UnsupportedError
from .errors import WeightsError as WeightsError
from .ops.annotate import AnnotateArgs as AnnotateArgs
from .ops.annotate import annotate as annotate
from .ops.cast import CastArgs as CastArgs
from .ops.cast import cast as cast
from .ops.checkpoint import CheckpointArgs as CheckpointArgs
from .ops.checkpoint import checkpoint as checkpoint
from .ops.compile import CompileArgs as CompileArgs
from .ops.compile import compile as compile
from .ops.decompose import decompose as decompose
from .ops.freeze import FreezeArgs as FreezeArgs
from .ops.freeze import freeze as freeze
from .ops.freeze import unfreeze as unfreeze
from .ops.fuse import FuseArgs as FuseArgs
from .ops.fuse import fuse as fuse
from .ops.hook import HookArgs as HookArgs
from .ops.hook import hook as hook
from .ops.probe import ProbeArgs as ProbeArgs
from .ops.probe import probe as probe
from .ops.replace import ReplaceArgs as ReplaceArgs
from .ops.replace import replace as replace
from .ops.trace import TraceArgs as TraceArgs
from .ops.trace import trace as trace
from .original import from_original as from_original
from .original import to_original as to_original
from .schedule import Entry as Entry
from .schedule import Phase as Phase
from .schedule import Schedule as Schedule
from .schedule import Traits as Traits
from .schedule import add as add
from .schedule import drop as drop
from .schedule import entries as entries
from .schedule import keep as keep
from .schedule import label as label
from .schedule import traits as traits
from .schedule import traits_of as traits_of

__version__ = "0.1.0"
