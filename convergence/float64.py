"""The truth's arithmetic: what upstream computes in float32 by name, computed in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import graph
from torch.overrides import TorchFunctionMode


class InFloat64(TorchFunctionMode):
    """Turns every explicit float32 into float64: upstream's norms, rotary angles, softmax and loss ask for float32 by
    name, and a truth that is rounded there is as noisy as the float32 baseline that it judges."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        if func is torch.Tensor.backward:
            return self._backward(*args, **(kwargs or {}))
        if func is torch.multinomial:  # a GPU draws other random numbers in float64: the truth samples what others do
            return func(args[0].to(torch.float32), *args[1:], **(kwargs or {}))

        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return func(*map(widen, args), **{key: widen(value) for key, value in (kwargs or {}).items()})

    def _backward(
        self, loss: torch.Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False,
        inputs: Any = None,
    ) -> None:  # fmt: skip
        """What a backward pass computes again (checkpointing) is widened, too. A mode is off inside of its own handler,
        and in ``torch.autograd.backward``, which asks for a handler as well: so this is what that function calls."""
        gradients = (torch.ones_like(loss) if gradient is None else gradient,)
        wanted = () if inputs is None else tuple(inputs)
        keep = create_graph if retain_graph is None else retain_graph
        with self:
            graph._engine_run_backward(
                (loss,), gradients, keep, create_graph, wanted, allow_unreachable=True, accumulate_grad=True
            )
