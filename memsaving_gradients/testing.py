"""A test for users: it compares a step with memory-saving gradients with the plain step, to the
last bit.

By default, TensorFlow does not fix its own last bits: two runs of plain training differ, and a
comparison would blame the gradients. Four settings fix them for the duration of the test: op
determinism; no arithmetic rewriting by grappler, which can fuse an op and not its copy; no memory
optimizer for the plain step, which adds up sums of large graphs in the order in which addends come;
and the same seeds and values of all variables for both steps.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from graph_tools.tf_private import autodiff, config, hooks
from memsaving_gradients.engine.differentiate import all_plain
from memsaving_gradients.engine.options import Options
from memsaving_gradients.errors import ArgumentError, BudgetWarning
from memsaving_gradients.patching import patched

__all__ = ["assert_same_gradients"]


@tf.autograph.experimental.do_not_convert
def assert_same_gradients(step: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Raise unless a training step computes the same bits with memory-saving gradients as with
    TensorFlow's own.

    The step is traced and run twice from the same state: with TensorFlow's gradients, and within
    ``patched(**options)``. The test compares all gradients that the step asks for, its results, and
    the variables that it uses, after the step. At the end, it restores the variables.

    Parameters
    ----------
    step
        A function of tensors, or a ``tf.function``, that computes gradients with tapes,
        ``tf.gradients`` or `memsaving_gradients.gradients`. It is traced anew; earlier traces stay
        as they are.
    *args
        Arguments of the step.
    **options
        As for `memsaving_gradients.patch`.

    Raises
    ------
    AssertionError
        If anything differs. The message names the variables whose gradients differ, in how many
        elements and by how much, then results and variables.
    ArgumentError
        If an option is unknown or cannot be used; or if the step asks for no gradients, or for
        gradients in a ``tf.function`` that keeps its first trace.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import memsaving_gradients as ms
    >>> from memsaving_gradients import testing
    >>> weights = [tf.Variable(tf.random.stateless_normal([64, 64], [i, 0])) for i in range(8)]
    >>> def step(x):
    ...     with tf.GradientTape() as tape:
    ...         h = x
    ...         for w in weights:
    ...             h = tf.tanh(h @ w)
    ...         loss = tf.reduce_mean(h**2)
    ...     for w, grad in zip(weights, tape.gradient(loss, weights)):
    ...         w.assign_sub(grad)
    >>> testing.assert_same_gradients(step, tf.ones([512, 64]))
    """
    Options.of(options)
    with config.deterministic():
        with all_plain():
            plain = _Traced(step, args)
        with warnings.catch_warnings():
            # The test itself keeps all gradients alive until the end of the step.
            warnings.simplefilter("ignore", BudgetWarning)
            with patched(**options):
                ours = _Traced(step, args)
        named = getattr(step, "__name__", step)
        if not plain.seen:
            raise ArgumentError(
                "step", named, "asks for no gradients when it is traced; compute them in the step"
            )
        if len(plain.seen) > len(ours.seen):
            raise ArgumentError(
                "step",
                named,
                "calls a tf.function that was traced before and keeps the graph with TensorFlow's"
                " gradients; call its python_function, or make the tf.function in the step",
            )
        variables = [*{id(v.handle): v for v in (*plain.variables, *ours.variables)}.values()]
        names = _unique([*map(_name, variables)])
        start = [variable.numpy() for variable in variables]
        found = []
        for traced in (plain, ours):
            quiet = config.without_memory_optimizer() if traced is plain else nullcontext()
            try:
                with quiet:
                    results, gradients = traced.run()
                state = dict(zip(names, [v.numpy() for v in variables], strict=True))
            finally:
                for variable, value in zip(variables, start, strict=True):
                    variable.assign(value)
            found.append((gradients, results, state))
    kinds = ("the gradient of", "the result", "after the step, the variable")
    different = [said for parts in zip(*found, kinds, strict=True) for said in _differences(*parts)]
    if different:
        raise AssertionError(
            "the step computes other values with memory-saving gradients: " + "; ".join(different)
        )


class _Traced:
    """A step that is traced anew, and writes its gradients into variables wherever it computes
    them.

    ``seen``: the gradients; ``variables``: all variables that the step uses.
    """

    def __init__(self, step: Callable[..., Any], args: tuple[Any, ...]) -> None:
        inner = autodiff.traced_anew(step)

        @tf.function(autograph=False)
        def traced(*args: Any) -> Any:
            # The first ops of two graphs, and of the functions that they call, get the same seeds.
            tf.compat.v1.set_random_seed(1)
            with _recorded(seen):
                return inner(*args)

        seen: list[_Seen] = []
        self._args, self._run = args, traced
        graph = traced.get_concrete_function(*args).graph
        # A step that creates variables is traced twice, and the first trace never runs.
        captured = {id(outer) for outer, _ in autodiff.captures_of(graph)}
        self.seen = [one for one in seen if all(id(copy.handle) in captured for copy in one.copies)]
        copies = {id(copy.handle) for one in seen for copy in one.copies}
        self.variables = [v for v in graph.variables if id(v.handle) not in copies]

    def run(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the step's results and its gradients, both by name."""
        results = self._run(*self._args)
        named = {str(k): leaf for k, leaf in enumerate(tf.nest.flatten(results))}
        gradients = [None if one.kind is None else one.copies for one in self.seen]
        return named, dict(zip(_unique([one.name for one in self.seen]), gradients, strict=True))


@dataclass(frozen=True)
class _Seen:
    """A gradient: the name of its variable or tensor, its type (``None``: no gradient), and the
    variables that hold copies of its parts."""

    name: str
    kind: type | None
    copies: tuple[tf.Variable, ...]


@contextmanager
def _recorded(seen: list[_Seen]) -> Iterator[None]:
    """Copy gradients that are built inside a block, in whatever graph, and add them to ``seen``."""

    def note(grads: Any, xs: Any) -> None:
        for x, grad in zip(tf.nest.flatten(xs), tf.nest.flatten(grads), strict=True):
            parts = tf.nest.flatten(tf.zeros([]) if grad is None else grad, expand_composites=True)
            copies = tuple(autodiff.written_to_variable(part) for part in parts if part is not None)
            seen.append(_Seen(_name(x), None if grad is None else type(grad), copies))

    def differentiate(inner: Any, ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        grads = inner(ys, xs, *args, **kwargs)
        # Gradients of a called function, in a graph of their own, are left to TensorFlow.
        graph = hooks.source_graph(ys, xs, *args, **kwargs)
        if graph is tf.compat.v1.get_default_graph():
            note(grads, xs)
        return grads

    def gradient(
        inner: Any, tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any
    ) -> Any:
        grads = inner(tape, target, sources, *args, **kwargs)
        if not tf.executing_eagerly():
            note(grads, sources)
        return grads

    with ExitStack() as stack:
        stack.callback(hooks.differentiation.wrap(differentiate))
        stack.callback(hooks.tape["gradient"].wrap(gradient))
        yield


def _name(x: Any) -> str:
    # A variable of Keras 3 has a path, and a name that other variables may share.
    name = getattr(x, "path", None) or getattr(x, "name", None) or type(x).__name__
    return str(name).removesuffix(":0")


def _unique(names: list[str]) -> list[str]:
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} (time {seen[name]})")
    return found


def _differences(plain: dict[str, Any], ours: dict[str, Any], what: str) -> list[str]:
    """Return a phrase for each difference; none where all is the same."""
    if plain.keys() != ours.keys():
        names = ", ".join(sorted(plain.keys() ^ ours.keys()))
        return [f"{what} {names}: computed by one of the two runs only"]
    found = []
    for name, expected in plain.items():
        if why := _difference(expected, ours[name]):
            found.append(f"{what} {name!r}: {why}")
    return found


def _difference(plain: Any, ours: Any) -> str:
    if (plain is None) != (ours is None):
        return f"is {'None' if ours is None else 'a tensor'}, and TensorFlow's is not"
    parts = [tf.nest.flatten(one, expand_composites=True) for one in (plain, ours)]
    if len(parts[0]) != len(parts[1]):
        return f"is {type(ours).__name__}, and TensorFlow's is {type(plain).__name__}"
    for theirs, found in zip(*(map(_array, part) for part in parts), strict=True):
        if theirs.dtype == object:
            # Strings: an array of them holds addresses.
            if theirs.tolist() != found.tolist():
                return "has other values"
            continue
        if theirs.shape != found.shape or theirs.dtype != found.dtype:
            return (
                f"has shape {found.shape} and dtype {found.dtype}, and TensorFlow's has"
                f" {theirs.shape} and {theirs.dtype}"
            )
        if theirs.tobytes() == found.tobytes():
            continue
        if theirs.dtype.kind not in "fciuV":
            return "has other values"
        far = np.abs(theirs.astype(np.complex128) - found.astype(np.complex128))
        largest = float(np.abs(theirs.astype(np.complex128)).max())
        return (
            f"{int((far > 0).sum()):,} of {far.size:,} elements differ, by at most {far.max():.3g};"
            f" the largest is {largest:.3g}"
        )
    return ""


def _array(value: Any) -> Any:
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)
