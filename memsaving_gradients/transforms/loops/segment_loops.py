"""The loops of a replay: one over the steps of a segment, and one over segments from the last to
the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from graph_tools.ops.trip_counts import behind_identities, note_steps
from memsaving_gradients.transforms.loops.checkpoint_positions import Cut
from memsaving_gradients.transforms.loops.tensor_lists import static_shape

__all__ = ["backwards", "loop_of"]


def backwards(
    segment: Callable[..., list[tf.Tensor]],
    cut: Cut,
    first: tf.Tensor,
    last: tf.Tensor,
    lists: Sequence[tf.Tensor],
    arguments: Sequence[tf.Tensor],
    carried: Sequence[tf.Tensor],
    shapes: Sequence[tf.TensorShape],
    segments: int,
    name: str,
) -> list[tf.Tensor]:
    """Return the gradients at step ``first``, given ``carried``, the gradients at step ``last``; go
    segment by segment, from the last one on."""
    count = len(lists)

    def step(stop: tf.Tensor, *variables: tf.Tensor) -> list[tf.Tensor]:
        held, grads = variables[:count], list(variables[count:])
        # Without these control edges, all segments would be replayed at once.
        with tf.control_dependencies([*grads, stop]):
            popped = [
                tf.raw_ops.TensorListPopBack(
                    input_handle=so_far, element_shape=static_shape(arg), element_dtype=arg.dtype
                )
                for so_far, arg in zip(held, arguments, strict=True)
            ]
            start = cut.before(tf.identity(stop))
        # Grappler does not know the shape of an element that is taken from a list, and would
        # rewrite less here than in the loop.
        states = [
            tf.ensure_shape(pop.tensor, arg.shape)
            for pop, arg in zip(popped, arguments, strict=True)
        ]
        rest = [pop.output_handle for pop in popped]
        return [start, *rest, *segment(stop, start, states, grads)]

    _, *variables = loop_of(
        lambda stop, *_: stop > first,
        step,
        [last, *lists, *carried],
        shapes=[tf.TensorShape([]), *(t.shape for t in lists), *shapes],
        steps=segments,
        parallel=1,
        name=name,
    )
    return variables[count:]


def loop_of(
    condition: Callable[..., tf.Tensor],
    body: Callable[..., Sequence[tf.Tensor]],
    variables: Sequence[tf.Tensor],
    *,
    steps: int,
    shapes: Sequence[tf.TensorShape] | None = None,
    parallel: int = 10,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Build a loop of about ``steps`` steps, note that number, and return the loop's results."""
    found = list(
        tf.while_loop(
            condition,
            body,
            list(variables),
            shape_invariants=None if shapes is None else list(shapes),
            parallel_iterations=parallel,
            name=name,
        )
    )
    note_steps(behind_identities(found[0]).op, max(1, steps))
    return found
