"""Passes over all blocks of scores: row by row for sums over keys, otherwise column by column.

In a pass over rows, a block of queries goes through all blocks of keys that it sees, and its
results are final. In a pass over columns, a block of keys collects its gradient from all blocks of
queries, while the gradient of queries is summed in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from memsaving_gradients.transforms.attention.blocks import BlockList, loop
from memsaving_gradients.transforms.attention.pairs import Place
from memsaving_gradients.transforms.attention.scores import Scores

__all__ = ["over_columns", "over_rows"]

Tensors = Sequence[tf.Tensor]
#: ``step(place, *state)`` returns the state after a block.
Step = Callable[..., Tensors]
#: ``pull(place, shared)`` returns the gradient for a block of queries, gradients for tensors in
#: blocks of keys, and the new sums that all blocks share. ``None``: nothing to add.
Pull = Callable[[Place, Tensors], tuple[Any, Sequence[Any], Tensors]]


def over_rows(
    scores: Scores,
    layouts: Sequence[BlockList],
    row: Callable[[Any], tuple[Tensors, Step, Callable[..., Tensors]]],
) -> list[tf.Tensor]:
    """Return results for each block of queries, stacked.

    Parameters
    ----------
    layouts
        The layouts of the results.
    row
        ``row(i)`` returns three things for block ``i`` of queries: the first state, the step with a
        block of keys, and a function that computes the results from the last state.
    """
    grid = scores.grid

    def of_queries(i: Any, *lists: tf.Tensor) -> list[tf.Tensor]:
        start, step, finish = row(i)
        results = finish(*grid.over_keys(i, step, start))
        return [at.set(x, i, made) for at, x, made in zip(layouts, lists, results, strict=True)]

    lists = loop(0, grid.rows.count, of_queries, [at.zeros() for at in layouts])
    return [at.stack(x) for at, x in zip(layouts, lists, strict=True)]


def over_columns(
    scores: Scores,
    columns: Tensors,
    column: Callable[[Any], Pull],
    shared: Tensors,
    wanted: Sequence[bool] | None = None,
) -> list[Any]:
    """Return the gradients for queries, for ``columns``, and ``shared`` after all blocks.

    Parameters
    ----------
    columns
        Tensors in blocks of keys: keys, perhaps values.
    column
        ``column(j)`` returns a function that pulls back each block of scores of these keys.
    shared
        The initial sums that all blocks share.
    wanted
        Whether queries and ``columns`` need a gradient; it is ``None`` for those that do not.
    """
    grid, count = scores.grid, len(columns)
    of_query, *layouts = (BlockList.like(x, grid.dtype) for x in (scores.query, *columns))

    def of_keys(j: Any, dq: tf.Tensor, *lists: tf.Tensor) -> list[tf.Tensor]:
        pull = column(j)

        def with_queries(place: Place, dq: tf.Tensor, *sums: tf.Tensor) -> list[tf.Tensor]:
            of_queries, parts, shared = pull(place, sums[count:])
            if of_queries is not None:
                dq = of_query.add(dq, place.row, of_queries)
            added = zip(sums[:count], parts, strict=True)
            return [dq, *(x if part is None else x + part for x, part in added), *shared]

        start = [dq, *(scores.zeros(*at.shape) for at in layouts), *lists[count:]]
        dq, *sums = grid.over_queries(j, with_queries, start)
        put = zip(layouts, lists[:count], sums[:count], strict=True)
        return [dq, *(at.set(x, j, made) for at, x, made in put), *sums[count:]]

    layouts_of_all = [of_query, *layouts]
    start = [*(at.zeros() for at in layouts_of_all), *shared]
    lists = loop(0, grid.columns.count, of_keys, start)
    axes = [grid.rows, *[grid.columns] * count]
    asked = [True] * (count + 1) if wanted is None else wanted
    found = zip(axes, layouts_of_all, lists[: count + 1], asked, strict=True)
    joined = [axis.join(at.stack(x), grid.options.axis) if w else None for axis, at, x, w in found]
    return [*joined, *lists[count + 1 :]]
