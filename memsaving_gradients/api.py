"""`gradients`: ``tf.gradients`` in less memory. `checkpoint` marks a tensor to keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from graph_tools.tf_private.autodiff import enclosing_graphs
from memsaving_gradients.engine.differentiate import ends_in, paused, rewired
from memsaving_gradients.engine.feedback.notices import OUTER, warn_nothing_saved
from memsaving_gradients.engine.marks import mark
from memsaving_gradients.engine.options import MODES, Options
from memsaving_gradients.errors import ArgumentError, EagerExecutionError

__all__ = ["checkpoint", "gradients", "gradients_collection", "gradients_memory", "gradients_speed"]


@tf.autograph.experimental.do_not_convert
def gradients(
    ys: Any,
    xs: Any,
    grad_ys: Any = None,
    name: str = "gradients",
    colocate_gradients_with_ops: bool = False,
    gate_gradients: bool = False,
    aggregation_method: int | None = None,
    stop_gradients: Any = None,
    unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    *,
    checkpoints: Any = "auto",
    hold_gradients: bool = False,
    xla: bool | None = None,
    batch_size: int | None = None,
    loop_steps: int | None = None,
    budget: int | float | str | None = None,
    planner: Any = "auto",
    max_slowdown: float | None = None,
    accumulate: bool = True,
    profile: bool = False,
    plan: Any = None,
    progress: Any = None,
    planning_seconds: float | None = None,
    loops: str = "auto",
    attention: str = "keep",
    encode: Any = "lossless",
    offload: Any = None,
) -> list[Any]:
    """Return the gradients of the sum of ``ys`` with respect to each of ``xs``, in less memory.

    Takes all arguments of ``tf.gradients`` and ``tf.compat.v1.gradients``, and returns the same
    values. The backward pass recomputes forward tensors that were not kept.

    Parameters
    ----------
    ys, xs, grad_ys, name, colocate_gradients_with_ops, gate_gradients, aggregation_method,
    stop_gradients
        As in ``tf.compat.v1.gradients``.
    unconnected_gradients
        As in ``tf.gradients``.
    checkpoints
        Which forward tensors to keep:

        - ``"auto"``: the marked tensors between xs and ys if there are any, else ``"memory"``;
        - ``"memory"``: the tensors that give the least simulated peak, found automatically;
        - ``"speed"``: outputs of expensive ops; cheap ones are recomputed;
        - ``"collection"``: tensors marked by `checkpoint` or in the graph collection
          ``"checkpoints"``;
        - a list of tensors, operations, names, glob patterns, layer names;
        - ``None`` or ``[]``: none; everything is recomputed from the inputs.
    hold_gradients
        For planning: whether all gradients are alive together at the end of the step (clipping by
        global norm, loss scaling).
    xla
        Whether XLA compiles the graph; detected if not given.
    batch_size
        The size to assume for an unknown batch dimension when bytes are estimated; 32 if not given.
        If there is such a dimension, a budget in bytes needs this argument.
    loop_steps
        The most steps of loops that do not show before they run how many they take; 256 if not
        given. If there are such loops, a budget in bytes needs this argument, and holds for any
        number of steps up to it. (More steps give the same gradients, and take more memory.)
    budget
        The most bytes of a step's transient peak (activations, temporaries and gradients; not
        variables, optimizer slots and inputs), in the chunks of TensorFlow's allocator. The planner
        looks for the plan that fits at the least extra time. An int is bytes; a string has a unit
        (``"2GiB"``, ``"800 MB"``); a float in (0, 1] is a fraction of plain training's bytes.
        Where plain training fits, gradients are plain (a `PlanNote` says so once). Plans keep
        marked tensors in addition. Under XLA, the bytes are XLA's own for the compiled step, and
        planning waits until the step's function has been traced to its end.
    planner
        The planner: ``"auto"``, ``"chain"``, ``"chen"``, ``"exact"``, ``"keep"``, ``"memory"``,
        ``"recursive"``, ``"speed"``, or a function of a ``TrainingGraph`` and ``Limits`` that
        returns a ``Proposal`` (`memsaving_gradients.planners`).
    max_slowdown
        Asks for the least memory with which a step takes at most this many times the estimated time
        of a plain step (1.2: 20 % more). Excludes ``budget``.
    accumulate
        Whether the step adds up sums as their addends come, instead of holding all of them: sums of
        ten addends or more (gradients of tied weights, of unrolled recurrences), and of fewer but
        large ones (gradients of normalizations). The order and the bits are the same as in
        TensorFlow's own kernel. But grappler's arithmetic rewriting, where it is on, first sorts
        ten or more addends, and merges additions of gradients into one; a step with a budget does
        neither, so the last bits may differ.
    profile
        Whether times of ops are measured on this device, once for each kind of op and shape,
        instead of estimated.
    plan
        A `Plan`, the path of a saved one (`Plan.save`), or a list of them, applied without
        planning. One of them must have been made for the same graph.
    progress
        ``None``: a bar on standard error, if that is a terminal and planning takes more than a
        second. ``False``: no bar. A function is called with a share from 0 to 1 (at last 1, even if
        planning was stopped) and a phrase. It may raise `memsaving_gradients.planners.Interrupted`
        to end planning with the best plan so far. Ctrl-C does the same, if some plan so far fits.
        Only planners that search report progress, such as those for budgets; modes plan at once.
    planning_seconds
        About the most seconds to plan. Then the best plan so far is used, with a
        `PlanningStoppedWarning`. Without this limit, a graph gets the same plan in every process.
    loops
        How to treat the graph's loops (``tf.while_loop``, ``tf.scan``, recurrent layers, others):

        - ``"keep"``: every step keeps the values that the gradient reads, as in TensorFlow;
        - ``"segments"``: the loop keeps its state at about √T of its T steps, and runs the steps
          between once more;
        - ``"treeverse"``: segments of segments of segments; the loop runs three more times, and
          holds about T^(1/4) states and T^(1/4) steps' values;
        - ``"auto"``: ``"segments"`` where the aim is the least memory (``checkpoints="memory"`` or
          ``None``, or a planner without a budget); with a budget, the first of these ways that
          keeps it; with ``max_slowdown``, the one that saves most in that time; else ``"keep"``.
          Under a budget, loops inside functions, branches and other loops keep all values, unless
          this argument names another way.
    attention
        How to treat scaled dot-product attention, such as in Keras' ``MultiHeadAttention`` and
        ``Attention`` or written by hand:

        - ``"keep"``: leave it as it is;
        - ``"blocks"``: compute it in blocks, forward and backward, wherever the library finds it;
          no number for each pair of a query and a key is held (`memsaving_gradients.attention`).
          The sums are the same, in another order: gradients differ from TensorFlow's by rounding
          (1e-5 of the largest one in ``float32``). The plan names the attention found, and why
          some stays (dropped weights; biases that have gradients; scores that other ops read).
    encode
        Whether residuals may be kept in fewer bytes:

        - ``"lossless"``: masks, signs and winners of pooling in bits, where that saves memory;
          gradients do not change;
        - ``"bfloat16"``, ``"float16"``, ``"int8"``: floating point residuals as well. Gradients
          change by about 2⁻⁹, 2⁻¹² and 2⁻⁸ of themselves (`gradient_error` measures it); the
          forward pass and the loss do not. With a budget, a plan encodes as many residuals as it
          must; otherwise all that lower the peak. With ``planner="keep"``, it recomputes nothing;
        - a mapping from tensors, names or glob patterns to one of these three: only those tensors;
        - ``None``: nothing is encoded.
    offload
        Whether residuals may be kept on another device. The step sends them there once they are
        computed, and gets them back in time. ``True`` (for a GPU: the CPU), the name of a device,
        or an `Offload`, which describes the link. With a budget, a plan offloads as many as it
        must; otherwise all that lower the peak. With ``planner="keep"``, it recomputes nothing.
        Gradients do not change. XLA cannot express offloading.

    Returns
    -------
    list
        A tensor, ``tf.IndexedSlices`` or ``None`` for each x: the values of TensorFlow's own
        gradients.

    Raises
    ------
    EagerExecutionError
        Outside of a graph.
    ArgumentError
        If an argument cannot be used; the graph is left as it was.
    BudgetError
        If no plan fits. The error names the least budget that works, in bytes and as a fraction.
    PlanError
        If ``plan`` cannot be read, or was made for another graph.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import memsaving_gradients as ms
    >>> @tf.function
    ... def slope(x):
    ...     y = x
    ...     for _ in range(8):
    ...         y = tf.sin(y)
    ...     return ms.gradients(y, x)
    >>> slope(tf.zeros([1000]))[0][0].numpy()
    np.float32(1.0)

    Half of the memory of plain training, at the least extra time:

    >>> @tf.function
    ... def slope_in_half(x):
    ...     y = x
    ...     for _ in range(32):
    ...         y = tf.sin(y)
    ...     return ms.gradients(y, x, budget=0.5, planner="memory")
    >>> slope_in_half(tf.zeros([1000]))[0][0].numpy()
    np.float32(1.0)
    >>> plan = ms.plans(slope_in_half)[-1]
    >>> plan.allocated <= plan.budget == plan.allocated_plain // 2
    True
    """
    options = Options(
        checkpoints=checkpoints,
        hold_gradients=hold_gradients,
        xla=xla,
        batch_size=batch_size,
        loop_steps=loop_steps,
        budget=budget,
        planner=planner,
        max_slowdown=max_slowdown,
        accumulate=accumulate,
        profile=profile,
        plan=plan,
        progress=progress,
        planning_seconds=planning_seconds,
        loops=loops,
        attention=attention,
        encode=encode,
        offload=offload,
    )
    _check_name(name)
    if tf.executing_eagerly():
        raise EagerExecutionError(
            "gradients: there is no graph to rewire in eager execution; call it inside of a"
            " function decorated with @tf.function, or under tf.Graph().as_default()"
        )
    graph = _checked_graph(ys, xs, grad_ys, stop_gradients)

    def differentiate() -> Any:
        return tf.compat.v1.gradients(
            ys,
            xs,
            grad_ys=grad_ys,
            name=name,
            colocate_gradients_with_ops=colocate_gradients_with_ops,
            gate_gradients=gate_gradients,
            aggregation_method=aggregation_method,
            stop_gradients=stop_gradients,
            unconnected_gradients=unconnected_gradients,
        )

    with graph.as_default():
        ends = ends_in(graph, ys)
        if not ends:
            return _plainly(graph, differentiate)
        return rewired(differentiate, ends, xs, options)


def _plainly(graph: tf.Graph, differentiate: Callable[[], Any]) -> Any:
    warn_nothing_saved(graph, f"{OUTER}; call gradients where ys are computed")
    with paused():
        return differentiate()


def _check_name(name: Any) -> None:
    # In the module memory_saving_gradients of TensorFlow 1 the fourth parameter was `checkpoints`.
    if name is not None and (not isinstance(name, str) or name in MODES):
        raise ArgumentError(
            "name",
            name,
            f"looks like a choice of checkpoints; give these by keyword: checkpoints={name!r}",
        )


def _checked_graph(ys: Any, xs: Any, grad_ys: Any, stop_gradients: Any) -> tf.Graph:
    """Return the graph to build gradients in; raise if a tensor cannot be differentiated there."""
    _check_types("ys", ys)
    _check_types("xs", xs)
    if stop_gradients is not None:
        _check_types("stop_gradients", stop_gradients)
    graph = _graph_of(ys)
    for argument, tensors in (
        ("ys", ys),
        ("xs", xs),
        ("grad_ys", grad_ys),
        ("stop_gradients", stop_gradients),
    ):
        _check_graph(argument, tensors, graph)
    for y in tf.nest.flatten(ys):
        dtype = tf.as_dtype(y.dtype)
        if not (dtype.is_floating or dtype.is_complex):
            raise ArgumentError(
                "ys",
                getattr(y, "name", y),
                f"has dtype {dtype.name}, which cannot be differentiated; cast or drop it",
            )
    return graph


def _check_types(argument: str, tensors: Any) -> None:
    for tensor in tf.nest.flatten(tensors):
        known = isinstance(tensor, (tf.Tensor, tf.Variable, tf.IndexedSlices)) or (
            hasattr(tensor, "handle") or tf.is_tensor(tensor)
        )
        if not known or type(tensor).__name__ == "KerasTensor":
            raise ArgumentError(
                argument,
                tensor,
                f"is a {type(tensor).__name__}; give tensors or variables of the graph, computed in"
                " a tf.function or a tf.Graph",
            )
        if isinstance(tensor, tf.Tensor) and not tf.is_symbolic_tensor(tensor):
            raise ArgumentError(
                argument,
                tensor,
                "is an eager tensor, computed outside of the graph; compute it inside of the"
                " tf.function, or pass it to the function as an argument",
            )


def _graph_of(ys: Any) -> tf.Graph:
    """Return the graph to build gradients in: the current one, or in TF1 code the graph of ys."""
    current = tf.compat.v1.get_default_graph()
    for y in _symbolic(ys):
        around = list(enclosing_graphs(current))
        if y.graph in around:
            break
        # TF1 enters the graph of ys by itself. A function's graph cannot be entered from outside.
        if len(around) == 1 and len(list(enclosing_graphs(y.graph))) == 1:
            return y.graph
    return current


def _check_graph(argument: str, tensors: Any, graph: tf.Graph) -> None:
    around = list(enclosing_graphs(graph))
    for tensor in _symbolic(tensors):
        if tensor.graph not in around:
            raise ArgumentError(
                argument,
                tensor.name,
                "belongs to another graph than the one that gradients are built in; compute ys and"
                " xs in one graph or tf.function and call gradients there",
            )


def _symbolic(tensors: Any) -> list[tf.Tensor]:
    return [
        t
        for t in tf.nest.flatten(tensors, expand_composites=True)
        if isinstance(t, tf.Tensor) and tf.is_symbolic_tensor(t)
    ]


def gradients_memory(ys: Any, xs: Any, grad_ys: Any = None, **kwargs: Any) -> list[Any]:
    """Call `gradients` with ``checkpoints="memory"``."""
    return gradients(ys, xs, grad_ys, checkpoints="memory", **kwargs)


def gradients_speed(ys: Any, xs: Any, grad_ys: Any = None, **kwargs: Any) -> list[Any]:
    """Call `gradients` with ``checkpoints="speed"``."""
    return gradients(ys, xs, grad_ys, checkpoints="speed", **kwargs)


def gradients_collection(ys: Any, xs: Any, grad_ys: Any = None, **kwargs: Any) -> list[Any]:
    """Call `gradients` with ``checkpoints="collection"``."""
    return gradients(ys, xs, grad_ys, checkpoints="collection", **kwargs)


def checkpoint(tensor: Any, name: str | None = None) -> Any:
    """Mark ``tensor`` as one to keep, and return it.

    In a graph, ``checkpoints="collection"`` and ``"auto"`` keep the marked tensors between xs and
    ys; with ``budget``, ``max_slowdown`` or ``planner``, plans keep them in addition to others. In
    eager code, this function is the identity.

    Parameters
    ----------
    tensor
        A floating point tensor, or a Keras symbolic tensor while a functional model is being built.
    name
        A name for the tensor (an identity of it), in plans and in lists of checkpoints.

    Raises
    ------
    ArgumentError
        If ``tensor`` is something else, or a tensor of the graph whose dtype has no gradient.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from memsaving_gradients.engine.marks import marked
    >>> with tf.Graph().as_default() as graph:
    ...     x = tf.compat.v1.placeholder(tf.float32, [4])
    ...     y = checkpoint(tf.tanh(x), name="middle")
    >>> [t.name for t in marked(graph)]
    ['middle:0']
    """
    if name is not None and not isinstance(name, str):
        raise ArgumentError("name", name, "give a string or None")
    if type(tensor).__name__ == "KerasTensor":
        # Keras takes seconds to import.
        from memsaving_gradients.engine.keras_layers import Checkpoint

        return Checkpoint(name=name)(tensor)
    return mark(tensor, name)
