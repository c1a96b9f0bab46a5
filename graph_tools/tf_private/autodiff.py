"""Every private TensorFlow call around differentiation and tracing, in one place.

Each comment says why there is no public way. Seen in TensorFlow 2.16 to 2.21.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import backprop, backprop_util, record, wrap_function
from tensorflow.python.eager.polymorphic_function import concrete_function, polymorphic_function
from tensorflow.python.framework import ops
from tensorflow.python.ops import (
    control_flow_ops,
    control_flow_util,
    control_flow_v2_func_graphs,
    resource_variable_ops,
    script_ops,
)
from tensorflow.python.ops.parallel_for import control_flow_ops as parallel_loops

__all__ = [
    "GradientTape",
    "captures_of",
    "compiled_by_xla",
    "compiling",
    "differentiated_function",
    "enclosing_graphs",
    "end_is_reported",
    "ends_of",
    "graphs_of",
    "home_of",
    "in_py_function",
    "is_branch",
    "is_compiled_alone",
    "is_recorded",
    "orders_effects",
    "outputs_of",
    "passes_gradient",
    "prepares_higher_orders",
    "tensors_in",
    "traced_anew",
    "variables_in",
    "vectorized",
    "without_side_gradients",
    "written_to_variable",
]

#: The class behind ``tf.GradientTape``.
GradientTape = backprop.GradientTape


def is_recorded(tensors: Sequence[tf.Tensor], besides: Any = None) -> bool:
    """Return whether a tape other than ``besides`` records computations on any of ``tensors``, so
    that their results may be differentiated.

    The set of recording tapes is not public (2.16 to 2.21).
    """
    own = besides is not None and besides._recording
    with besides.stop_recording() if own else contextlib.nullcontext():
        return bool(record.should_record_backprop(tensors))


def compiled_by_xla() -> bool:
    """Return whether XLA will compile the current trace.

    While ``tf.function(jit_compile=True)`` traces, its graph is in an XLA context, which inner
    graphs see; so are replicas on TPUs. In threads in which a distribution strategy traces, the
    context is missing. There the stack is searched for the function: it is the ``self`` of its
    tracing methods. (Neither is public; 2.16 to 2.21.) Automatic clustering is a global option.
    """
    if tf.config.optimizer.get_jit():
        return True
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        return True
    return any(function._jit_compile for function in _traced_functions())


def _traced_functions() -> Iterator[Any]:
    """Yield the functions that are being traced, the innermost first; each several times."""
    for frame in _callers():
        if frame.f_code.co_filename == polymorphic_function.__file__:
            traced = frame.f_locals.get("self")
            if isinstance(traced, polymorphic_function.Function):
                yield traced


def is_compiled_alone(graph: tf.Graph) -> bool:
    """Return whether ``graph`` is being traced, and XLA will compile it as a program of its own.
    Branches and called functions are parts of a larger program.

    Of the functions that are being traced, the innermost must be compiled and no other; see
    `compiled_by_xla` (2.16 to 2.21).
    """
    traced = list(dict.fromkeys(_traced_functions()))
    compiled = [bool(function._jit_compile) for function in traced]
    return compiled[:1] == [True] and sum(compiled) == 1 and home_of(graph) is graph


@contextlib.contextmanager
def compiling(graph: tf.Graph) -> Iterator[None]:
    """Enter a traced graph in the XLA context of its trace, so that new ops know that XLA compiles
    them. (The context is not public; 2.16 to 2.21.)"""
    xla = control_flow_ops.XLAControlFlowContext()
    with graph.as_default():
        xla.Enter()
        try:
            yield
        finally:
            xla.Exit()


def end_is_reported() -> bool:
    """Return whether TensorFlow reports the end of the current trace
    (`graph_tools.tf_private.hooks.when_traced`). It does not under ``tf.compat.v1.wrap_function``,
    whose private module is then on the stack (2.16 to 2.21)."""
    return not any(frame.f_code.co_filename == wrap_function.__file__ for frame in _callers())


def vectorized() -> bool:
    """Return whether the current trace is the body of a parallel loop (``vectorized_map``), which
    is converted afterwards.

    Nothing public shows it; the private function that calls the body is on the stack (2.16 to
    2.21).
    """
    body = parallel_loops._pfor_impl.__code__
    return any(frame.f_code is body for frame in _callers())


def prepares_higher_orders() -> bool:
    """Return whether a function is being differentiated several times, because the tapes around its
    call might request higher orders.

    Only the private method on the stack shows it (2.16 to 2.21).
    """
    method = concrete_function._HigherOrderTapeGradientFunctions._forward_and_backward_functions
    return any(frame.f_code is method.__code__ for frame in _callers())


@dataclass(frozen=True, eq=False)
class _FirstBackward:
    """The backward function of a call's first gradient, with the signature of a later one: it also
    takes gradients of side outputs, which must be zeros."""

    first: Any
    own: int
    refuse: Callable[[], None]

    @property
    def outputs(self) -> Any:
        return self.first.outputs

    @property
    def structured_outputs(self) -> Any:
        return self.first.structured_outputs

    @property
    def captured_inputs(self) -> Any:
        return self.first.captured_inputs

    def _call_flat(self, grads: Sequence[tf.Tensor], captured: Sequence[tf.Tensor]) -> Any:
        if not all(map(_is_zeros, grads[self.own :])):
            self.refuse()
        return self.first._call_flat(list(grads[: self.own]), captured)


def _is_zeros(tensor: tf.Tensor) -> bool:
    if tensor.op.type == "ZerosLike":
        return True
    value = tf.get_static_value(tensor)
    return value is not None and not value.any()


def differentiated_function(functions: Any) -> tf.Graph:
    """Return the graph of the function that ``functions`` are the gradients of; ``functions`` is
    the object that `graph_tools.tf_private.hooks.call_gradients` is called on."""
    graph: tf.Graph = functions._func_graph
    return graph


def without_side_gradients(
    functions: Any, count: int | None, refuse: Callable[[], None]
) -> tuple[Any, Any] | None:
    """Return forward and backward functions that compute a later gradient of a call by the
    functions of its first gradient; ``None`` for the first gradient itself.

    The first gradient makes a call return the values that it reads: side outputs. For a later
    gradient, TensorFlow differentiates the function anew, side outputs included. Their gradients
    are zeros unless it is a gradient of gradients; then ``refuse`` is called, and must raise. The
    call keeps its outputs.

    ``functions``, ``count``: the arguments of the method behind
    `graph_tools.tf_private.hooks.call_gradients`. The method and its results are private (2.16 to
    2.21).
    """
    pairs, own = functions._cached_function_pairs, functions._num_inference_outputs
    if count is None or count <= own or own not in pairs:
        return None
    outputs = functions._func_graph.outputs[:own]
    trainable = sum(map(backprop_util.IsTrainable, outputs))
    forwards = (forward for forward, _ in pairs.values())
    most = max(forwards, key=lambda forward: len(forward.function_type.flat_outputs))
    return most, _FirstBackward(pairs[own][1], trainable, refuse)


def in_py_function() -> bool:
    """Return whether TensorFlow runs ``tf.py_function``, or its gradient, in this thread.

    It runs these in a thread of its executor, which may be the thread that called a function. Only
    private modules on the stack show it (2.16 to 2.21).
    """
    return any(frame.f_code.co_filename == script_ops.__file__ for frame in _callers())


def _callers() -> Iterator[FrameType]:
    """Yield the frames of the stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def passes_gradient(op: tf.Operation) -> bool:
    """Return whether a gradient can flow through ``op``, from its outputs to its inputs.

    Gradient functions are registered by op type, without public accessor; ``None`` means "not
    differentiable" (2.16 to 2.21). Calls of functions have none registered and are differentiated
    as a whole.
    """
    try:
        # By type first: looking for an override on the op itself is slow, and matters only if the
        # type has no gradient function.
        return (
            ops.gradient_registry.lookup(op.type) is not None
            or ops.get_gradient_function(op) is not None
        )
    except LookupError:
        return True


def enclosing_graphs(graph: tf.Graph) -> Iterator[tf.Graph]:
    """Yield ``graph``, the graph that its function was traced in, and so on outwards."""
    inner: tf.Graph | None = graph
    while inner is not None:
        yield inner
        # Only FuncGraphs have the attribute; the class is not public (2.16 to 2.21).
        inner = getattr(inner, "outer_graph", None)


def captures_of(graph: tf.Graph) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Return the tensors that ``graph`` captures, each with its placeholder inside. Only FuncGraphs
    have captures; the class is not public (2.16 to 2.21)."""
    return list(getattr(graph, "captures", ()))


def home_of(graph: tf.Graph) -> tf.Graph:
    """Return the graph that runs as a whole and contains ``graph``: bodies and branches are parts
    of the graph around them.

    Other functions may be called from many graphs. Of FuncGraphs, only bodies, conditions and
    branches have classes of their own (2.16 to 2.21).
    """
    parts = (
        control_flow_v2_func_graphs.CondBranchFuncGraph,
        control_flow_v2_func_graphs.WhileBodyFuncGraph,
        control_flow_v2_func_graphs.WhileCondFuncGraph,
    )
    return next(level for level in enclosing_graphs(graph) if not isinstance(level, parts))


def is_branch(graph: tf.Graph) -> bool:
    """Return whether ``graph`` is a branch (see `home_of`)."""
    return isinstance(graph, control_flow_v2_func_graphs.CondBranchFuncGraph)


def orders_effects(graph: tf.Graph) -> bool:
    """Return whether the effects of ``graph`` on variables will follow the order of the program, by
    automatic control dependencies.

    TensorFlow adds these when the trace is complete. Until then the graph notes whether it will
    (2.16 to 2.21).
    """
    return bool(graph._add_control_dependencies)


def ends_of(graph: tf.Graph) -> list[tf.Tensor | tf.Operation]:
    """Return the outputs of the function of ``graph``, and the ops that run for their effect; an
    empty list if they are unknown, or not known yet.

    Only FuncGraphs have these; the class is not public (2.16 to 2.21).
    """
    return [*outputs_of(graph), *getattr(graph, "control_outputs", ())]


def outputs_of(graph: tf.Graph) -> list[tf.Tensor]:
    """Return the outputs of the function whose body is ``graph`` (see `ends_of`)."""
    return list(getattr(graph, "outputs", ()))


def graphs_of(thing: Any) -> list[tf.Graph] | None:
    """Return the graphs behind a graph, a concrete function or a ``tf.function`` (all traces);
    ``None`` for anything else."""
    if isinstance(thing, tf.Graph):
        return [thing]
    if isinstance(thing, polymorphic_function.Function):
        # Public accessors return new traces, not the existing ones (2.16 to 2.21).
        return [concrete.graph for concrete in thing._list_all_concrete_functions()]
    if isinstance(getattr(thing, "graph", None), tf.Graph):
        return [thing.graph]
    return None


def traced_anew(function: Any, *, compiled: bool = False) -> Any:
    """Return an untraced ``tf.function`` of the same Python function with the same options; wrap
    any other function in a ``tf.function``. ``compiled``: XLA compiles it in any case.

    There is no public way to trace a function again or to read its options (2.16 to 2.21).
    """
    if not isinstance(function, polymorphic_function.Function):
        return tf.function(function, jit_compile=compiled or None)
    anew = function._clone(None)
    if compiled:
        anew._jit_compile = True
    return anew


def written_to_variable(tensor: tf.Tensor) -> tf.Variable:
    """Return a new variable that ``tensor`` is written to whenever its graph runs, also in a
    function, a branch or a loop.

    Code that a ``tf.function`` traces may create no variables, except those of a private class
    (2.16 to 2.21).
    """
    shape = tensor.shape
    with tf.init_scope():
        known = [] if shape.rank is None else [n or 0 for n in shape.as_list()]
        copy = resource_variable_ops.ResourceVariable(
            tf.zeros(known, tensor.dtype), trainable=False, shape=shape
        )
    copy.assign(tensor)
    return copy


def variables_in(graph: tf.Graph) -> list[tf.Variable]:
    """Return the variables read so far in the graph of a function that is being traced, in the
    order of their first use.

    ``variables`` also has them during the trace, as long as another object holds them. Trainable
    ones are also in a private set of the graph (2.16 to 2.21).
    """
    handles = {id(outer): k for k, (outer, _) in enumerate(graph.captures)}
    known = {id(v.handle): v for v in (*graph.variables, *graph._watched_variables)}
    found = [v for handle, v in known.items() if handle in handles]
    return sorted(found, key=lambda variable: handles[id(variable.handle)])


def tensors_in(graph: tf.Graph, things: Iterable[Any]) -> list[tf.Tensor]:
    """Return the tensors of ``graph`` that represent the given tensors and variables; without those
    unknown to ``graph``.

    A FuncGraph reads variables and tensors of other graphs through placeholders of its own.
    ``captures`` lists the pairs, but its class is not public (2.16 to 2.21). A tensor from further
    out passes through each graph in between.
    """
    levels = [getattr(level, "captures", ()) for level in enclosing_graphs(graph)]
    found = []
    for thing in things:
        # Resource variables (Keras ones too) have a handle, reference variables a tensor.
        tensor = getattr(thing, "handle", None)
        if tensor is None:
            tensor = getattr(thing, "_variable", thing)
        if isinstance(tensor, tf.Tensor):
            found.append(tensor)
    for pairs in reversed(levels):
        inside = {id(outer): inner for outer, inner in pairs}
        found = [inside.get(id(tensor), tensor) for tensor in found]
    return [t for t in found if tf.is_symbolic_tensor(t) and t.graph is graph]
