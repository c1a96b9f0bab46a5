"""Note the gradients that optimizers get while a microbatch is traced, to apply them once for all
microbatches.

A training step gives its gradients to an optimizer: to Keras' ``apply`` (which ``apply_gradients``
calls), or to TF1's ``apply_gradients``. While a microbatch is traced, these methods only note their
arguments; the gradients become outputs of the microbatch like others. If a step changes its weights
by itself, this cannot be postponed, and is refused.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from graph_tools.tf_private import graphs
from memsaving_gradients.errors import ArgumentError

__all__ = ["Application", "changed_in", "check_no_other_updates", "check_updates", "noted"]


@dataclass(frozen=True, eq=False)
class Application:
    """Gradients that an optimizer was asked to apply.

    Attributes
    ----------
    apply
        A function that applies gradients given in the order of ``grads``.
    grads
        The gradients of one microbatch; ``None`` where there is none.
    graph, made
        The graph in which it was noted, and the creation index of the next op there.
    """

    apply: Callable[[Sequence[Any]], Any]
    grads: list[Any]
    graph: tf.Graph = field(default_factory=tf.compat.v1.get_default_graph)
    made: int = field(init=False)

    def __post_init__(self) -> None:
        made = self.graph.get_operations()
        object.__setattr__(self, "made", 1 + graphs.creation_index(made[-1]) if made else 0)

    def sees(self, earlier: Application) -> bool:
        """Return whether its gradients may be of weights that an earlier one has updated."""
        parts = [part for grad in self.grads for part in _parts(grad)]
        return any(
            part.graph is not earlier.graph or graphs.creation_index(part.op) >= earlier.made
            for part in parts
        )


@contextmanager
def noted() -> Iterator[list[Application]]:
    """Let optimizers inside note the gradients that they are asked to apply, in the list."""
    found: list[Application] = []
    undo = [_replace(kind, name, make(found)) for kind, name, make in _places()]
    try:
        yield found
    finally:
        for put_back in undo:
            put_back()


def _places() -> Iterator[tuple[type, str, Callable[[list[Application]], Any]]]:
    """Yield each class of optimizers that defines the method itself, the method's name and its
    substitute: overrides, which call their base class's method, must not run either."""
    for kind in _with_subclasses(tf.compat.v1.train.Optimizer):
        if "apply_gradients" in kind.__dict__:
            yield kind, "apply_gradients", _noting_pairs
    # Keras is not imported for programs that do not use it.
    keras = sys.modules.get("keras")
    if keras is not None:
        for kind in [
            *_with_subclasses(keras.optimizers.Optimizer),
            *keras.optimizers.Optimizer.__mro__,
        ]:
            if "apply" in kind.__dict__:
                yield kind, "apply", _noting


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    inner: type
    for inner in kind.__subclasses__():
        yield from _with_subclasses(inner)


def _replace(kind: type, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    own = kind.__dict__[name]
    setattr(kind, name, make(own))
    return lambda: setattr(kind, name, own)


def _noting(found: list[Application]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
            variables = None if trainable_variables is None else list(trainable_variables)

            def really(merged: Sequence[Any]) -> Any:
                return original(self, list(merged), variables)

            found.append(Application(really, list(grads)))

        return apply

    return make


def _noting_pairs(found: list[Application]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def apply_gradients(
            self: Any, grads_and_vars: Any, global_step: Any = None, name: str | None = None
        ) -> tf.Operation:
            grads, variables = zip(*grads_and_vars, strict=True)

            def really(merged: Sequence[Any]) -> Any:
                return original(self, [*zip(merged, variables, strict=True)], global_step, name)

            found.append(Application(really, list(grads)))
            return tf.no_op()

        return apply_gradients

    return make


def check_updates(function: Any, applied: Sequence[Application]) -> None:
    """Raise if a microbatch computes gradients after others were applied: they would not see the
    updated weights.

    Raises
    ------
    ArgumentError
        The error says what to do instead.
    """
    if any(later.sees(earlier) for earlier, later in itertools.combinations(applied, 2)):
        raise ArgumentError(
            "function",
            getattr(function, "__qualname__", function),
            f"hands gradients to optimizers {len(applied)} times, and computes later ones after it"
            " applied earlier ones, but microbatches apply all of them at the end of the step;"
            " compute all gradients before you apply the first, or call ms.microbatch for each of"
            " the losses instead of for the whole step (in Keras: in train_step, and leave"
            " microbatch= out)",
        )


def _parts(grad: Any) -> list[tf.Tensor]:
    if isinstance(grad, tf.IndexedSlices):
        return [grad.values, grad.indices]
    return [] if grad is None else [grad]


def check_no_other_updates(graph: tf.Graph) -> None:
    """Raise if a microbatch, traced in ``graph``, changes trainable variables.

    Raises
    ------
    ArgumentError
        The error names the variable, and says what to do instead.
    """
    changed = changed_in(graph)
    for variable in graph.trainable_variables:
        if op := changed.get(id(variable.handle)):
            raise ArgumentError(
                "function",
                variable.name,
                f"this variable is changed ({op.type}) for each microbatch, not once for the"
                " batch; return the gradients and apply them outside, or call an optimizer's"
                " apply_gradients, in a function that was not traced before. If the variable is"
                " not a weight, make it with trainable=False",
            )


def changed_in(graph: tf.Graph) -> dict[int, tf.Operation]:
    """Return the op that changes each variable in a function's graph, by the ``id`` of the
    variable's handle outside of it."""
    outside = {id(inner): id(outer) for outer, inner in graph.captures}
    return {
        outside[id(handle)]: op
        for op in graph.get_operations()
        for handle in graphs.written_by(op)
        if id(handle) in outside
    }
