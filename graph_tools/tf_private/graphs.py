"""Every private TensorFlow call that capturing and editing graphs needs, in one place.

TensorFlow 2 has no public way to copy an op or to re-point one of its inputs
(``tf.contrib.graph_editor`` has no successor). The calls below are what TensorFlow's own Python
code uses for the purpose; each comment says why there is no public one. Seen in TensorFlow 2.16 to
2.21.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.eager import record
from tensorflow.python.framework import auto_control_deps_utils, op_def_registry
from tensorflow.python.ops import handle_data_util
from tensorflow.python.util import _pywrap_util_port, tf_stack

from graph_tools.tf_private.loops import LOOPS

__all__ = [
    "add_control_inputs",
    "are_equal",
    "as_autograph_would",
    "clear_attribute",
    "conditional",
    "conditional_on",
    "create_gate",
    "create_held",
    "create_in",
    "create_op",
    "creation_index",
    "has_onednn",
    "in_v1_control_flow",
    "is_function",
    "is_protected",
    "is_registered",
    "is_watched",
    "left_by_autograph",
    "let_feed",
    "may_be_fed",
    "outside_scopes",
    "profile",
    "protect",
    "set_attribute",
    "stack",
    "stand_in",
    "tape_is_recording",
    "unprotect",
    "unrecorded",
    "update_input",
    "user_frames",
    "variable_bytes",
    "written_by",
]

_PROTECTED = "_grappler_do_not_remove"


@contextmanager
def outside_scopes(graph: tf.Graph) -> Iterator[None]:
    """Enter ``graph`` with no control dependencies, colocation or device inherited from the
    caller."""
    with graph.as_default(), graph.control_dependencies(None), tf.device(None):
        yield


def stand_in(tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
    """Return an identity of ``tensor`` on its device, outside of all scopes; tapes record it.

    Strategies of ``tf.distribute`` read the devices of gradients.
    """
    with outside_scopes(tensor.graph), tf.device(tensor.device or None):
        return tf.identity(tensor, name=name)


def create_op(op: tf.Operation, inputs: Sequence[tf.Tensor], name: str) -> tf.Operation:
    """Make a copy of ``op`` under ``name`` that reads ``inputs`` and has no control inputs.

    ``Graph.create_op`` is deprecated and drops the op definition. It and every generated op wrapper
    call ``_create_op_internal`` (2.16 to 2.21).
    """
    copy = op.graph._create_op_internal(
        op.type,
        list(inputs),
        [out.dtype for out in op.outputs],
        name=name,
        attrs=dict(op.node_def.attr),
        op_def=_definition(op),
        compute_device=False,
    )
    if op.device:
        # The setter is private since 1.x; `tf.device` around the creation would cost a
        # device-merging function call for each op (2.16 to 2.21).
        copy._set_device(op.device)
    for theirs, ours in zip(op.outputs, copy.outputs, strict=True):
        ours.set_shape(theirs.shape)
    return copy


def are_equal(op: tf.Operation, other: tf.Operation) -> bool:
    """Return whether grappler may merge two ops with equal inputs: it compares all attributes, and
    leaves `protect`-ed ops alone."""
    if op.device != other.device:
        return False
    attributes, theirs = op.node_def.attr, other.node_def.attr
    return _PROTECTED not in attributes and dict(attributes) == dict(theirs)


def is_function(graph: tf.Graph) -> bool:
    """Return whether ``graph`` is the body of a function. Grappler knows the shapes of a function's
    arguments, but not of tensors that a session feeds (2.16 to 2.21)."""
    return isinstance(graph, tf.__internal__.FuncGraph)


def create_held(
    tensor: tf.Tensor, name: str, controls: Iterable[tf.Operation], device: str
) -> tf.Tensor:
    """Return an identity of ``tensor`` on ``device`` that runs after ``controls``, and that no
    grappler pass touches (see `protect`).

    It equals ``tf.raw_ops.Identity`` under ``tf.control_dependencies`` and ``tf.device``, but takes
    a third of the time; there is at least one for each run of clones. ``_create_op_internal`` as in
    `create_op` (2.16 to 2.21).
    """
    dtype = tensor.dtype
    held = tensor.graph._create_op_internal(
        "Identity",
        [tensor],
        [dtype],
        name=name,
        attrs=_held_attributes(dtype),
        op_def=op_def_registry.get("Identity"),
        compute_device=False,
    )
    if device:
        held._set_device(device)
    add_control_inputs(held, [op for op in controls if op is not tensor.op])
    return held.outputs[0]


@cache
def _held_attributes(dtype: tf.DType) -> dict[str, tf.compat.v1.AttrValue]:
    kind = tf.compat.v1.AttrValue(type=dtype.base_dtype.as_datatype_enum)
    return {"T": kind, _PROTECTED: tf.compat.v1.AttrValue(b=True)}


def create_gate(
    graph: tf.Graph, name: str, controls: Iterable[tf.Operation], device: str
) -> tf.Operation:
    """Return an op on ``device`` that does nothing and runs after ``controls``; private as in
    `create_held` (2.16 to 2.21)."""
    gate = graph._create_op_internal(
        "NoOp", [], [], name=name, op_def=op_def_registry.get("NoOp"), compute_device=False
    )
    if device:
        gate._set_device(device)
    add_control_inputs(gate, controls)
    return gate


def is_registered(kind: str) -> bool:
    """Return whether TensorFlow knows ops of type ``kind``; other types are names of functions of
    their graph (not public; 2.16 to 2.21)."""
    return op_def_registry.get(kind) is not None


def _definition(op: tf.Operation) -> Any:
    """Return the definition of ``op``. A registered one is not parsed anew at each access (the
    registry is not public, 2.16 to 2.21)."""
    return op_def_registry.get(op.type) or op.op_def


def create_in(
    graph: tf.Graph,
    kind: str,
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.DType],
    attributes: Mapping[str, Any],
    definition: Any,
) -> tf.Operation:
    """Make an op of type ``kind`` in ``graph``, with its attributes as protos.

    ``tf.raw_ops`` converts inputs, and takes attributes as Python values, which
    `Operation.node_def` does not hold. ``_create_op_internal`` as in `create_op` (2.16 to 2.21).
    """
    return graph._create_op_internal(
        kind, list(inputs), list(outputs), attrs=dict(attributes), op_def=definition
    )


def conditional(predicate: tf.Tensor, tensor: tf.Tensor, then: Any, otherwise: Any) -> tf.Tensor:
    """Return ``then(tensor)`` or ``otherwise(tensor)``, which are concrete functions."""
    (result,) = conditional_on(predicate, [tensor], then, otherwise, [tensor])
    return result


def conditional_on(
    predicate: tf.Tensor,
    tensors: Sequence[tf.Tensor],
    then: Any,
    otherwise: Any,
    like: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Return ``then(*tensors)`` or ``otherwise(*tensors)``: concrete functions whose results have
    the types and shapes of ``like``.

    ``tf.cond`` traces its branches anew each time, which takes 10 ms. The raw op takes functions,
    but its caller must add them to the graph (``add_to_graph`` is public but undocumented; 2.16 to
    2.21).
    """
    for function in (then, otherwise):
        function.add_to_graph(predicate.graph)
    results = tf.raw_ops.StatelessIf(
        cond=predicate,
        input=list(tensors),
        Tout=[t.dtype for t in like],
        then_branch=then,
        else_branch=otherwise,
        output_shapes=[t.shape for t in like],
    )
    for result, one in zip(results, like, strict=True):
        result.set_shape(one.shape)
    return list(results)


def update_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Re-point input ``index`` of ``op``: private, the only way to edit an edge (2.16 to 2.21)."""
    op._update_input(index, tensor)


def add_control_inputs(op: tf.Operation, controls: Iterable[tf.Operation]) -> None:
    """Make ``op`` wait for ``controls``: public only at creation time (2.16 to 2.21)."""
    if ends := [end for control in dict.fromkeys(controls) for end in _ends(control)]:
        op._add_control_inputs(ends)


def _ends(op: tf.Operation) -> list[tf.Operation]:
    """Return the ops whose end means that ``op`` has run: for a loop, identities of outputs read.

    A control edge from the loop itself would keep all its variables when TensorFlow lowers it to
    switches and merges. Accumulators that no gradient reads would be filled, and grappler would
    rewrite the loop's body less than in TensorFlow's own graph.
    """
    if op.type not in LOOPS:
        return [op]
    read = [t for t in op.outputs if t.dtype != tf.resource and t.consumers()]
    # A gradient may read an accumulator and take no element of it.
    read = [t for t in read if t.dtype != tf.variant] or read
    return [create_held(t, f"{op.name}_ended", (), op.device).op for t in read] or [op]


def set_attribute(op: tf.Operation, name: str, value: tf.compat.v1.AttrValue) -> None:
    """Set an attribute of an existing op. The only way is a private call, which the gradients of
    loops and branches use (2.16 to 2.21)."""
    op._set_attr(name, value)


def clear_attribute(op: tf.Operation, name: str) -> None:
    """Remove an attribute of an existing op; as private as `set_attribute` (2.16 to 2.21)."""
    op._clear_attr(name)


def protect(op: tf.Operation) -> None:
    """Exempt ``op`` from every grappler pass, by the attribute that TensorFlow's own loop gradients
    set (2.16 to 2.21)."""
    set_attribute(op, _PROTECTED, tf.compat.v1.AttrValue(b=True))


def is_protected(op: tf.Operation) -> bool:
    """Return whether `protect` holds for ``op``."""
    return _PROTECTED in op.node_def.attr


def unprotect(op: tf.Operation) -> None:
    """Undo `protect`: grappler keeps a protected op, and all ops that it needs, even if no op reads
    it."""
    clear_attribute(op, _PROTECTED)


def unrecorded() -> Any:
    """Return a context in which gradient tapes record nothing; only private since 2.0 (`record`,
    2.16 to 2.21)."""
    return record.stop_recording()


def written_by(op: tf.Operation) -> list[tf.Tensor]:
    """Return the handles of resources that ``op`` may change, also inside of a function or a loop.

    TensorFlow finds these for its automatic control dependencies, by lists and attributes that are
    not public (2.16 to 2.21).
    """
    return list(auto_control_deps_utils.get_read_write_resource_inputs(op)[1])


def as_autograph_would(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` as a ``tf.function`` around the caller would call it: converted, unless
    autograph is off there.

    In a graph that no ``tf.function`` traces, it stays unchanged. (Only private modules offer the
    conversion; 2.16 to 2.21.)
    """
    converted: Callable[..., Any] = autograph.tf_convert(
        function, ag_ctx.control_status_ctx(), convert_by_default=False
    )
    return converted


def left_by_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark ``function`` so that autograph calls it unconverted, but stays on for functions that it
    calls (not public; 2.16 to 2.21)."""
    marked: Callable[..., Any] = autograph.autograph_artifact(function)
    return marked


def tape_is_recording() -> bool:
    """Return whether a gradient tape might record an op created now (private; 2.16 to 2.21)."""
    return bool(record.could_possibly_record())


def is_watched(tensor: tf.Tensor) -> bool:
    """Return whether a gradient tape would record ops that read ``tensor`` (private; 2.16 to
    2.21)."""
    return bool(record.should_record_backprop([tensor]))


def creation_index(op: tf.Operation) -> int:
    """Return the place of ``op`` in its graph's order of creation (no public accessor; 2.16 to
    2.21)."""
    return int(op._id)


def may_be_fed(tensor: tf.Tensor) -> bool:
    """Return whether a session may feed ``tensor``: sessions do not run graphs of functions."""
    return not is_function(tensor.graph) and bool(tensor.graph.is_feedable(tensor))


def let_feed(tensors: Iterable[tf.Tensor]) -> None:
    """Undo ``Graph.prevent_feeding``, for which there is no public way (2.16 to 2.21)."""
    for tensor in tensors:
        tensor.graph._unfeedable_tensors.discard(tensor)


def in_v1_control_flow(op: tf.Operation) -> bool:
    """Return whether ``op`` is inside a TF1 frame (``Switch``/``Enter``) and so cannot be copied
    alone.

    The context is kept only on the op, without public accessor. XLA has contexts of its own, which
    are no frames (2.16 to 2.21).
    """
    context = op._get_control_flow_context()
    while context is not None:
        if not context.IsXLAContext():
            return True
        context = context.outer_context
    return False


@cache
def has_onednn() -> bool:
    """Return whether TensorFlow uses oneDNN's kernels where there are any: on CPUs, if oneDNN is
    on (nothing public shows it, 2.16 to 2.21)."""
    return bool(_pywrap_util_port.IsMklEnabled()) and not tf.config.list_physical_devices("GPU")


def stack() -> list[tuple[str, int]]:
    """Return ``(file, line)`` of the Python frames that run now, outermost first.

    In functions that AutoGraph converted, file and line are the user's. Only TensorFlow's own view
    of the stack knows these; it is not public (2.16 to 2.21).
    """
    return [(frame.filename, frame.lineno) for frame in tf_stack.extract_stack()]


def user_frames(op: tf.Operation) -> list[tuple[str, int, str]]:
    """Return ``(file, line, source)`` of the Python frames that created ``op``, outermost first; an
    empty list if no Python code created it.

    ``Operation.traceback`` is public but undocumented; its frames have ``filename``, ``lineno``,
    ``line``. Ops of an imported graph have none (2.16 to 2.21).
    """
    return [(frame.filename, frame.lineno, frame.line or "") for frame in op.traceback or ()]


def profile(serialized: bytes) -> Any:
    """Return the content of the profiler's ``xplane.pb`` file as a message.

    TensorFlow ships the message's class, but exports it nowhere (2.16 to 2.21).
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    return xplane_pb2.XSpace.FromString(serialized)


def variable_bytes(handle: tf.Tensor) -> int:
    """Return the bytes of the variable behind a handle; 0 if its shape is not known.

    A graph that captures a variable has a handle and no variable. The handle's data are not public
    (2.16 to 2.21).
    """
    data = handle_data_util.get_resource_handle_data(handle)
    if data is None or not data.is_set or not data.shape_and_type:
        return 0
    known = data.shape_and_type[0]
    count = tf.TensorShape(known.shape).num_elements()
    return (count or 0) * tf.as_dtype(known.dtype).size
