r"""Cross entropy of a linear head, from hidden states to loss and gradients.

    logits = hidden @ weight^T + bias,    loss = cross_entropy(logits, targets)  (formula in cross_entropy.py)

T tokens, hidden size H, V classes, chunks of C tokens, slabs of S classes, b bytes an element. "operations" counts the
GEMMs; "memory" is the peak beyond the inputs, both gradients included:

    schedule      operations          memory
    "fast"        6 T H V             b (T (V - K) + V H + T H)
    "balanced"    6 T H V             4 V H + b T H + b V C
      "none"      8 T H V - 2 T H (K + M)   the same
    "small"       8 T H V - 2 T H K   b (V H + T S) + 4 T H

- "fast" is one chunk. It keeps the logits, and the backward overwrites them by their gradient. The logits of the first
  K = V H / (T + H) classes lie in the memory of grad_weight, behind the rows of these classes. K is 0 if

  - that saves less than 512 MiB,
  - the first K rows of grad_weight cannot hold grad_hidden in float32 (b K < 4 T),
  - the weight needs no gradient,
  - the loss has label smoothing, or
  - ``torch.compile`` compiles it: on a GPU it sees the two products and the kernels of cross_entropy.py.

  More than 8192 tokens go in chunks of 8192: their float32 sum of grad_weight is smaller than all logits.
- "balanced" goes in token chunks. The forward computes the gradients and sums them over the chunks in float32, after
  Liger Kernel's idea (arXiv:2410.10989). grad_weight is rounded in the memory of its sum. A backward pass that retains
  the graph makes copies.

  Reduction "none" has no gradient in the forward, so it goes in vocabulary slabs. It keeps the logits of M more classes
  in as much memory as chunks of 1024 tokens need: M = V (H + 1024) / T - H in 16 bits, 1024 V / T in float32. float16,
  label smoothing, a given ``chunk_size`` and compiled programs go in token chunks. There the logits of the first
  chunk stay, but not in a compiled program; the backward computes the others again.
- "small" goes in vocabulary slabs. The forward keeps the loss and the logits of the first K classes. The backward
  computes the other logits again. Logits lie in the rows of grad_weight that are not written yet. "small" does not
  support label smoothing, and is never the default.

Token chunks are in ``schedules/token_chunks.py``, slabs in ``schedules/vocabulary_slabs.py``, the choice between
them in ``schedules/chosen.py``.

Without gradients only the loss is computed. An input that needs no gradient costs no buffer and no GEMM.

If the classes are split over the ranks of a process group (``vocab_parallel.py``), every schedule goes in slabs, and V
is the number of a rank's classes.

float16 always goes in token chunks, even in a single one. In the other schedules the gradient of the logits contains
the upstream gradient and 1 / denominator, and float16 would flush most of it to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernels.ops.lora.adapter import LoraAdapter
from liger_kernels.ops.lora.low_rank import LowRank
from liger_kernels.ops.lora.projection import as_it_is
from liger_kernels.ops.loss.counted_rows import CountedTargets
from liger_kernels.ops.loss.cross_entropy import (
    CrossEntropyOutput,
    as_kernel_weight,
    cross_entropy,
    reference,
    with_extras,
)
from liger_kernels.ops.loss.head import Head, head_of
from liger_kernels.ops.loss.operators import linear_cross_entropy_op
from liger_kernels.ops.loss.options import LossOptions, takes_options
from liger_kernels.ops.loss.schedules.chosen import choose_schedule
from liger_kernels.ops.loss.schedules.schedule import (
    TENSORS,
    Call,
    Packed,
    Schedule,
    Upstream,
    current_observer,
    padded,
)
from liger_kernels.ops.runtime.arguments import Limit, checked, checked_op, one_of
from liger_kernels.ops.runtime.dispatch import backward_once, use_triton
from liger_kernels.ops.runtime.kept import keeps_graph

MEMORY = ("fast", "balanced", "small")
Memory = Annotated[str, one_of(MEMORY)]
ChunkSize = Annotated[int, Limit("{x} >= 1", "at least 1 token")]


@takes_options()
@checked
def linear_cross_entropy_ref(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    row_weight: Tensor | None = None,
    denominator: Tensor | None = None,
    adapters: Sequence[LoraAdapter] = (),
    dense: Callable[[Tensor], Tensor] = as_it_is,
    group: Any = None,
    **options: Any,
) -> Tensor | CrossEntropyOutput:
    """:func:`linear_cross_entropy` in plain torch. It holds all logits, in the input's dtype."""
    o = LossOptions.checked(options)
    weights = class_weight, row_weight, denominator
    head = head_of(hidden, weight, targets, bias, o, *weights, adapters=adapters, dense=dense, group=group)
    return reference(head.logits(), targets, *weights, o)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """A schedule between autograd's forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        z: Tensor | None,
        b: Tensor | None,
        call: Call,
        schedule: Schedule,
        entropy: bool,
    ) -> tuple[Tensor, ...]:
        """The loss, the extras, and the log-probabilities of the chosen classes if there are any.

        Args:
            call: contains the tensors before it, too.
            entropy: whether the extra "entropy" has a gradient.
        """
        output = schedule.forward(call)
        extras = output.rows.extras
        low = call.low if call.low is not None and schedule.reads(call.options) else (None, None)
        kept = *call.for_backward(schedule), *low, extras["entropy"] if entropy else None
        ctx.save_for_backward(*kept, *output.saved)
        # Not saved with save_for_backward: a backward overwrites them, and autograd would refuse a second backward.
        ctx.buffers = output.buffers
        ctx.schedule, ctx.options, ctx.needs = schedule, call.options, call.needs
        ctx.rows_and_classes = {"taken": call.taken, "shard": call.shard}
        ctx.packed = None if call.packed is None else call.packed.dense
        ctx.b_dtype = None if b is None else b.dtype
        ctx.entropy = list(extras).index("entropy") if entropy else None
        ctx.has_ids = call.ids is not None
        ctx.teacher = None if call.teacher is None else call.teacher.as_numbers()
        ctx.like_loss = output.loss.shape, output.loss.device
        ctx.mark_non_differentiable(*[t for name, t in extras.items() if not entropy or name != "entropy"])
        ctx.set_materialize_grads(False)
        return output.loss, *extras.values(), *(() if output.rows.ids is None else [output.rows.ids])

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad_loss: Tensor | None, *of_extras: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_entropy = None if ctx.entropy is None else of_extras[ctx.entropy]
        grad_ids = of_extras[-1] if ctx.has_ids else None
        if grad_loss is None and grad_entropy is None and grad_ids is None:
            return (None,) * 8
        schedule, saved = ctx.schedule, ctx.saved_tensors  # raises if an earlier backward freed the graph
        call = Call.of(saved[:TENSORS], ctx.options, ctx.needs, ctx.teacher)._replace(**ctx.rows_and_classes)
        z, b, entropy, *saved = saved[TENSORS:]
        if z is not None:
            call = call._replace(low=LowRank(z, b))
        if ctx.packed is not None and call.weight is not None:
            call = call._replace(weight=Packed(call.weight, ctx.packed).matrix(call.hidden.dtype))
        # A schedule that reads the arguments can compute overwritten logits again.
        overwrite = schedule.reads(ctx.options) or not keeps_graph()
        buffers = ctx.buffers
        if overwrite:
            ctx.buffers = None
        shape, device = ctx.like_loss
        grad_loss = torch.zeros(shape, device=device) if grad_loss is None else grad_loss
        upstream = Upstream(grad_loss, None if grad_entropy is None else entropy, grad_entropy, grad_ids)
        found = schedule.backward(call, saved, buffers, upstream, overwrite)
        grads = [grad if needed else None for grad, needed in zip(found, ctx.needs, strict=False)]
        hidden, weight, bias, *low = grads
        z, b = low or (None, None)
        return hidden, weight, bias, z, b if b is None else b.to(ctx.b_dtype), None, None, None


def _is_traced_whole(hidden: Tensor, vocab: int) -> bool:
    """Whether ``torch.compile`` sees "fast" as a product and the kernels of :func:`cross_entropy`, not as an operator.

    That saves the operator's host time, and a copy of the logits: a compiled program copies what an operator
    overwrites. Only the operator pads rows of an odd vocabulary and serves an observer."""
    aligned = padded(vocab) == vocab
    return torch.compiler.is_compiling() and use_triton(hidden) and aligned and current_observer() is None


def uncompiled(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``op(*args, **kwargs)`` outside of the program that is being compiled."""
    return torch.compiler.disable(op)(*args, **kwargs)  # as a decorator it would import the compiler for everybody


def run_schedule(schedule: Schedule, call: Call, entropy: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the extras of ``call.options.written()`` by name, with "id_log_probs" if ``call`` has ids.

    Args:
        entropy: whether the extra "entropy" has a gradient. Only for reduction "none".
    """
    plain = type(call.hidden) in (Tensor, torch.nn.Parameter) or call.shard is not None or call.low is not None
    if torch.compiler.is_compiling() or not plain:
        loss, *extras = linear_cross_entropy_op(call, schedule, entropy)
    else:
        low = (None, None) if call.low is None else call.low
        inputs = call.hidden, call.weight, call.bias, *low
        loss, *extras = LinearCrossEntropyFunction.apply(*inputs, call, schedule, entropy)
    ids = () if call.ids is None else ("id_log_probs",)
    return loss, dict(zip((*call.options.written(), *ids), extras, strict=True))


def _loss_of(
    head: Head,
    targets: Tensor,
    o: LossOptions,
    weights: dict[str, Any],
    chunk_size: int | None,
    memory: Memory | None,
    counted: CountedTargets | int | None,
    invariant: bool,
) -> Tensor | CrossEntropyOutput:
    """:func:`linear_cross_entropy` of checked arguments.

    Args:
        weights: class_weight, row_weight and denominator.
    """
    vocab = head.weight.shape[0]
    rows, taken, low, needs = head.rows(counted, targets, o.ignore_index, o.extras, invariant)
    memory, schedule = choose_schedule(rows, vocab, o, needs, chunk_size, memory, head.shard, invariant=invariant)
    class_weight, row_weight, denominator = weights.values()
    if not head.runs:
        return reference(head.logits(invariant), targets, class_weight, row_weight, denominator, o)
    if memory == "fast" and not invariant and _is_traced_whole(head.hidden, vocab):
        logits = F.linear(head.hidden, head.weight, head.bias)
        return cross_entropy(logits, targets, **weights, **o.as_arguments())
    row_weight = None if row_weight is None else taken.take(row_weight)
    of_kernels = as_kernel_weight(class_weight), as_kernel_weight(row_weight), denominator
    tensors = rows, head.weight, head.bias, taken.targets, *of_kernels
    loss, extras = run_schedule(schedule, Call(*tensors, o, needs, taken, head.shard, low, head.packed))
    loss = taken.spread(loss) if o.reduction == "none" else loss
    extras = {name: taken.spread(extra) for name, extra in extras.items()}
    return with_extras(loss, o, targets, extras)


@takes_options()
@checked_op
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    row_weight: Tensor | None = None,
    denominator: Tensor | None = None,
    chunk_size: ChunkSize | None = None,
    memory: Memory | None = None,
    counted: CountedTargets | int | None = None,
    adapters: Sequence[LoraAdapter] = (),
    dense: Callable[[Tensor], Tensor] = as_it_is,
    group: Any = None,
    invariant: bool = False,
    **options: Any,
) -> Tensor | CrossEntropyOutput:
    """:func:`cross_entropy` of ``F.linear(hidden, weight, bias)`` with one buffer of logits, all or a chunk of them.

    Under autocast, hidden, weight and bias are cast as ``F.linear`` casts them.

    Args:
        hidden: [tokens, hidden size], float16, bfloat16, float32, or float64 (which runs the reference).
        weight: [vocab, hidden size], of the same dtype.
        targets: [tokens], int64 or int32.
        bias: [vocab], of the same dtype, or None.
        class_weight, row_weight, denominator: as in :func:`cross_entropy`.
        chunk_size: tokens whose logits are held at once. If that is all tokens, it is "fast". Not with ``memory``.
        memory: the schedule. The top of this file has its operations and its memory.

            - "fast" keeps all logits until the backward: fewest operations, most memory. More than 8192 tokens go in
              chunks of 8192, except with "none". Without gradients, "fast" is "balanced".
            - "balanced" holds the logits of C = 2048 tokens; of 1024 for a hidden size below 2048; and of 4096 for one
              of 4096 or more if the weight has a gradient.
            - "small" holds little more than the gradients, and computes most logits twice. With label smoothing it is
              "balanced".

            float16 is always "balanced". By default it is "fast" for at most 2 * hidden size + c tokens in bfloat16,
            and for at most c tokens in float32; c is 2048, or 1024 for a hidden size below 2048. Else it is "balanced".
            Under ``torch.compile``, "fast" holds the logits twice; there the limit is at most hidden size tokens.
        counted: an upper bound on the number of targets that are not ``ignore_index``: an int, or a
            :class:`CountedTargets`, which does not stop the GPU. If it is at most 15/16 of the tokens, only these rows
            are multiplied, unless ``extras`` describe ignored rows, too. If more targets count, the loss is NaN, or on
            a CPU a ``ValueError`` is raised. None: all rows.
        adapters: :class:`LoraAdapter` of the head, of any float dtype. float64 runs the reference. Not with ``group``.
            ``torch.compile`` runs them in Python.
        dense: makes a matrix of a packed ``weight``, such as one of four bits, in any float dtype. The forward calls
            it, and a backward that reads the matrix calls it again; only the packed weight is saved. ``torch.compile``
            runs it in Python.
        group: the ``torch.distributed.ProcessGroup`` over whose ranks the classes are split, in the order of the ranks.
            ``weight`` and ``bias`` have this rank's classes, in any number. All other arguments, the results and the
            gradient of hidden are the same on every rank. The host waits for the GPU in the first call with a weight.
            Not with ``chunk_size``, label smoothing or float16. ``torch.compile`` runs it in Python.
        invariant: the bits of a row's loss and extras depend on this row alone, not on how many rows there are nor on
            where it stands, and so do those of its gradient for one ``denominator`` and upstream gradient (not in
            float16). Products go in blocks of 1024 rows, the last one padded. "fast" keeps logits for "none" alone, all
            of them, and "balanced" of one chunk; with ``group``, "small" runs. Chunks have 1024 rows more if
            weight requires grad.
        options: the fields of :class:`LossOptions`, by name.

    Returns:
        The loss in float32 (float64 for float64 inputs), 0-d or [tokens] for "none"; with ``extras`` a
        :class:`CrossEntropyOutput`. Nothing but the loss carries a gradient, and that gradient is not differentiable.

    Raises:
        TypeError, ValueError: for an argument of a wrong type, shape, device or range; for targets out of range as
            :func:`cross_entropy` does.
    """
    weights: dict[str, Any] = {"class_weight": class_weight, "row_weight": row_weight, "denominator": denominator}
    of_head: dict[str, Any] = {"adapters": adapters, "dense": dense, "group": group}
    how: dict[str, Any] = {"chunk_size": chunk_size, "memory": memory, "counted": counted, "invariant": invariant}
    if (group is not None or adapters or dense is not as_it_is) and torch.compiler.is_compiling():
        every = weights | of_head | how | options
        return uncompiled(linear_cross_entropy, hidden, weight, targets, bias, **every)
    o = LossOptions.checked(options)
    head = head_of(hidden, weight, targets, bias, o, class_weight, row_weight, denominator, **of_head)
    return _loss_of(head, targets, o, weights, **how)
