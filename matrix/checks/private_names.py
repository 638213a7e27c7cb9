"""Every private name of other packages that this project touches, and what goes wrong for users when it changes.

Where a change of the name would raise by itself, touching it is enough. Where it would go unnoticed (a hook that nobody
looks at any more, a mark that nobody sets), ``holds`` is what has to be true.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True)
class Private:
    """One name, or several that go together.

    Attributes:
        names: as they stand in the source, without what they are looked up on.
        where: the importable object that has them, "module:attribute.attribute"; None where instances have them.
        goes_wrong: what happens to a user when it changes.
        holds: what must be true where that would go unnoticed.
        needs: "cuda" for what only a CUDA build of torch has; or a package that need not be there.
    """

    names: tuple[str, ...]
    where: str | None
    goes_wrong: str
    holds: Callable[[], bool] | None = None
    needs: str = ""

    def __str__(self) -> str:
        return self.names[0]


def gradients_are_summed_in_place() -> bool:
    """Two gradients are summed in the memory of one, also where their operations are counted."""
    from liger_kernels.fitting.count import LiveBytes

    x = torch.ones(256, device="meta", requires_grad=True)
    y = x * 2 + x * 3
    upstream = torch.ones_like(y)
    with LiveBytes("") as counted:
        torch.autograd.backward([y], [upstream])
    return counted.peak == 2 * x.nbytes


def kinds_of_hooks() -> bool:
    """All kinds that a module has: a new one would not be looked at."""
    own = {name for name in vars(nn.Linear(1, 1)) if name.endswith("_hooks")}
    of_state = {
        f"_{when}_hooks" for when in ("state_dict", "state_dict_pre", "load_state_dict_pre", "load_state_dict_post")
    }
    return own == {*HOOKS} | of_state


def kinds_of_global_hooks() -> bool:
    module = importlib.import_module("torch.nn.modules.module")
    found = {name for name in vars(module) if name.startswith("_global") and name.endswith("_hooks")}
    registration = {f"_global_{what}_registration_hooks" for what in ("buffer", "module", "parameter")}
    return found == {f"_global{name}" for name in HOOKS} | registration


def a_module_keeps_its_own() -> bool:
    layer = nn.Sequential(nn.BatchNorm1d(2))
    return (
        [*layer._modules] == ["0"]
        and [*layer[0]._parameters] == ["weight", "bias"]
        and "running_mean" in (layer[0]._buffers)
    )


def a_compiled_module_says_so() -> bool:
    layer: Any = nn.Linear(1, 1)
    layer.compile(backend="eager")
    wrapped: Any = torch.compile(nn.Linear(1, 1), backend="eager")
    called = torch.compile(lambda x: x, backend="eager")
    return (
        layer._compiled_call_impl is not None
        and isinstance(wrapped._orig_mod, nn.Linear)
        and hasattr(called, "_torchdynamo_orig_callable")
    )


def a_kept_graph_is_known_in_its_backward() -> bool:
    seen: list[bool] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            seen.append(torch._C._autograd._get_current_graph_task_keep_graph())
            return 2 * grads[0]

    y = Looks.apply(torch.ones(1, requires_grad=True))
    y.backward(retain_graph=True)
    y.backward()
    return seen == [True, False]


def a_pass_knows_its_nodes() -> bool:
    """Which it runs: all in a backward, some for the gradients of chosen tensors; and its number, no other pass's."""
    seen: list[tuple[bool, int]] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            other = ctx.next_functions[1][0]
            seen.append((torch._C._will_engine_execute_node(other), torch._C._current_graph_task_id()))
            return 2 * grads[0], None

    x, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    y = Looks.apply(x, other)
    y.backward(retain_graph=True)
    torch.autograd.grad(y, x)
    (all_run, first), (chosen_runs, second) = seen
    return all_run and not chosen_runs and first != second


def a_place_gets_its_value() -> bool:
    """A result of a node whose memory comes later is still that node's, and says who listens to its gradient."""
    x: Any = torch.ones(2, requires_grad=True) * 2
    x.data = torch.full((2,), 3.0)
    before = not x._backward_hooks
    handle = x.register_hook(lambda grad: None)
    during = bool(x._backward_hooks)
    handle.remove()
    return x.grad_fn is not None and float(x[1]) == 3.0 and before and during and not x._backward_hooks


def an_export_is_known() -> bool:
    """In it, and in no other program that is traced."""
    seen: list[bool] = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if torch.compiler._is_exporting_flag else x + 2

    x = torch.zeros(2)
    seen.append(float(torch.export.export(Looks(), (x,), strict=True).module()(x)[0]) == 1.0)
    seen.append(float(torch.compile(Looks(), backend="eager")(x)[0]) == 2.0)
    return all(seen)


def trl_asks_whether_its_kernel_runs() -> bool:
    from trl.trainer.utils import selective_log_softmax

    return "_supports_trl_loss_kernel" in selective_log_softmax.__code__.co_names


def a_transform_is_known() -> bool:
    inside: list[Any] = []
    look = torch._C._functorch.peek_interpreter_stack

    def looks(x: torch.Tensor) -> torch.Tensor:
        inside.append(look())
        return x

    torch.func.vmap(looks)(torch.ones(2))
    return inside[0] is not None and look() is None


def a_trace_is_known() -> bool:
    inside: list[Any] = []
    look = torch._C._get_tracing_state

    def looks(x: torch.Tensor) -> torch.Tensor:
        inside.append(look())
        return x + 1

    torch.jit.trace(looks, (torch.ones(2),), check_trace=False)
    return inside[0] is not None and look() is None


def a_graph_of_operations_is_known() -> bool:
    from torch.fx.experimental.proxy_tensor import make_fx

    inside: list[Any] = []
    modes, mode, proxies = (
        torch._C._len_torch_dispatch_stack,
        torch._C._get_dispatch_mode,
        torch._C._TorchDispatchModeKey.PROXY,
    )

    def looks(x: torch.Tensor) -> torch.Tensor:
        inside.append((modes(), mode(proxies)))
        return x + 1

    make_fx(looks)(torch.ones(2))
    (count, found), *_ = inside
    return count > 0 and found is not None and modes() == 0 and mode(proxies) is None


def a_mode_of_functions_is_counted() -> bool:
    from torch.overrides import TorchFunctionMode

    count = torch._C._len_torch_function_stack
    with TorchFunctionMode():
        inside = count()
    return inside == count() + 1


def a_write_counts() -> bool:
    x = torch.zeros(1)
    before = x._version
    x.add_(1)
    return x._version == before + 1


def hooks_of_a_parameter() -> bool:
    x: Any = nn.Parameter(torch.ones(1))
    x.register_hook(lambda grad: grad)
    x.register_post_accumulate_grad_hook(lambda x: None)
    return bool(x._backward_hooks) and bool(x._post_accumulate_grad_hooks)


def modes_are_off_inside() -> bool:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes

    with FakeTensorMode(), _disable_current_modes():
        return not isinstance(torch.zeros(1), FakeTensor)


def fsdp_marks_its_parameters() -> bool:
    from torch.distributed.fsdp import _common_utils

    return _common_utils.FSDP_FLATTENED == "_fsdp_flattened"


def accelerate_marks_a_module() -> bool:
    from accelerate.hooks import ModelHook, add_hook_to_module

    layer = add_hook_to_module(nn.Linear(1, 1), ModelHook())
    return {"_hf_hook", "_old_forward"} <= vars(layer).keys()


def a_configuration_takes_an_attention() -> bool:
    import transformers

    config: Any = transformers.LlamaConfig()
    config._attn_implementation = "eager"
    config = type(config).from_dict(config.to_dict(), attn_implementation="sdpa")
    return config._attn_implementation == "sdpa"


def experts_have_a_gate() -> bool:
    """Since transformers 5 and its packed experts; before, nothing is looked for."""
    import transformers

    if int(transformers.__version__.partition(".")[0]) < 5:
        return True
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config_class: Any = transformers.MixtralConfig
    config = config_class(experts_implementation="grouped_mm")
    return config._experts_implementation == "grouped_mm" and hasattr(MixtralExperts, "_apply_gate")


def products_are_grouped() -> bool:
    """Since torch 2.8; public since 2.10."""
    from liger_kernels.ops import _grouped

    return _grouped._grouped_mm is not None


def hooks_on_saved_tensors_are_known() -> bool:
    """Where torch lacks it, every op saves first, which costs the host a node."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None:
        return True
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        inside = top(True)
    return top(True) is None and inside is not None


def a_layer_says_which_adapters_run() -> bool:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(nn.Sequential(nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))
    whole: Any = model
    layer = whole.base_model.model[0]
    state = vars(layer)
    if state["_disable_adapters"] or layer.active_adapters != ["default"]:
        return False
    state["_active_adapter"] = ["other"]
    switched = layer.active_adapters == ["other"]
    layer.enable_adapters(False)
    return switched and bool(state["_disable_adapters"])


def a_caller_is_known() -> bool:
    import sys

    return sys._getframe(0).f_globals["__name__"] == __name__


NAMES = (
    Private(
        HOOKS,
        None,
        "a hook on the head is not seen, and gets no logits; a copy that is probed calls a user's hooks",
        kinds_of_hooks,
    ),
    Private(
        tuple(f"_global{name}" for name in HOOKS[:3]),
        "torch.nn.modules.module",
        "a hook on all modules is not seen, and gets no logits",
        kinds_of_global_hooks,
    ),
    Private(("_modules", "_parameters", "_buffers"), None, "nothing is recognised", a_module_keeps_its_own),
    Private(
        ("_compiled_call_impl", "_torchdynamo_orig_callable", "_orig_mod"),
        None,
        "what is compiled already is patched, without effect",
        a_compiled_module_says_so,
    ),
    Private(
        ("_autograd", "_get_current_graph_task_keep_graph"),
        "torch:_C._autograd._get_current_graph_task_keep_graph",
        "the second backward of a kept graph finds its tensors overwritten",
        a_kept_graph_is_known_in_its_backward,
    ),
    Private(
        ("_top_saved_tensors_default_hooks",),
        None,
        "checkpointing computes the last product of gated units and experts again",
        hooks_on_saved_tensors_are_known,
    ),
    Private(
        ("_supports_trl_loss_kernel",),
        "trl.trainer.utils:_supports_trl_loss_kernel",
        "on a GPU, trl's ORPO and CPO read logits that nobody needs",
        trl_asks_whether_its_kernel_runs,
        needs="trl.kernels.logprob_entropy",
    ),
    Private(
        ("_active_adapter", "_disable_adapters"),
        None,
        "an adapter is computed that is not active, or that disable_adapter() switched off",
        a_layer_says_which_adapters_run,
        needs="peft",
    ),
    Private(
        ("_will_engine_execute_node", "_current_graph_task_id"),
        "torch:_C._will_engine_execute_node",
        "who asks for the gradient of outputs.logits gets none, or a parameter gets its own twice",
        a_pass_knows_its_nodes,
    ),
    Private(
        ("_backward_hooks", "_make_wrapper_subclass"),
        "torch:Tensor._make_wrapper_subclass",
        "a hook on outputs.logits is not called",
        a_place_gets_its_value,
    ),
    Private(
        ("_is_exporting_flag",),
        "torch:compiler._is_exporting_flag",
        "a compiled model runs without kernels, or an exported one has some",
        an_export_is_known,
    ),
    Private(
        ("_functorch",),
        "torch:_C._functorch.peek_interpreter_stack",
        "a transform of torch.func reaches a fused loss that it cannot differentiate",
        a_transform_is_known,
    ),
    Private(
        ("_get_tracing_state",),
        "torch:_C._get_tracing_state",
        "a program of torch.jit.trace has kernels, which nobody else can run",
        a_trace_is_known,
    ),
    Private(
        ("_len_torch_dispatch_stack", "_get_dispatch_mode", "_TorchDispatchModeKey"),
        "torch:_C._get_dispatch_mode",
        "a graph of make_fx lacks what a kernel writes",
        a_graph_of_operations_is_known,
    ),
    Private(
        ("_len_torch_function_stack",),
        "torch:_C._len_torch_function_stack",
        "a mode that a patch leaves on for the whole process is not seen",
        a_mode_of_functions_is_counted,
    ),
    Private(("_version",), None, "logits that are stale are computed with new weights", a_write_counts),
    Private(("_post_accumulate_grad_hooks",), None, "a patch that hooks parameters goes unseen", hooks_of_a_parameter),
    Private(
        ("_disable_current_modes", "_python_dispatch"),
        "torch.utils._python_dispatch:_disable_current_modes",
        "a probe under FakeTensorMode computes nothing, and nothing is recognised",
        modes_are_off_inside,
    ),
    Private(("_fsdp_flattened",), None, "a shard counts as a weight", fsdp_marks_its_parameters),
    Private(
        ("_hf_hook", "_old_forward"),
        None,
        "a weight that accelerate offloads is used where it is not",
        accelerate_marks_a_module,
        "accelerate",
    ),
    Private(
        ("_attn_implementation",),
        None,
        "the set-up sequence-parallel attends within each rank",
        a_configuration_takes_an_attention,
        "transformers",
    ),
    Private(
        ("_apply_gate", "_experts_implementation", "_is_expert_parallel"),
        None,
        "the experts of a mixture run without kernels",
        experts_have_a_gate,
        "transformers",
    ),
    Private(
        ("_cdata", "_storage_Use_Count", "_use_count", "_local_scalar_dense", "_fn"),
        None,
        "the memory of a step is calculated wrong",
        gradients_are_summed_in_place,
    ),
    Private(("_destroy",), "torch.library:Library._destroy", "raises in liger_kernels.fit"),
    Private(("_grouped_mm",), None, "experts are multiplied in a loop, which waits for the GPU", products_are_grouped),
    Private(("_getframe",), "sys:_getframe", "whoever reads the output counts as a user", a_caller_is_known),
    Private(("_cuda_getCurrentRawStream",), "torch:_C._cuda_getCurrentRawStream", "raises at a launch", None, "cuda"),
    Private(("_sleep",), "torch.cuda:_sleep", "raises in a benchmark", None, "cuda"),
    Private(("torch.utils._pytree",), "torch.utils._pytree:tree_map", "raises at import"),
    Private(("_NormBase",), "torch.nn.modules.batchnorm:_NormBase", "raises while norms are recognised"),
    Private(("_ConvNd",), "torch.nn.modules.conv:_ConvNd", "raises while modules are recognised"),
    Private(("_DropoutNd",), "torch.nn.modules.dropout:_DropoutNd", "raises while a model of the zoo is built"),
    Private(("_engine_run_backward",), "torch.autograd.graph:_engine_run_backward", "raises in the proof's truth"),
    # Of Triton's interpreter, in the proof. That what is replaced is still what runs, tests/test_ops_runtime.py shows:
    # it compares roundings, and counts what is prepared. There, too: the rule of the kept programs.
    *(
        Private((name,), f"triton.runtime.interpreter:{name}", "raises where the proof begins", None, "triton")
        for name in (
            "_convert_float",
            "_get_np_dtype",
            "_ir",
            "_patch_attr",
            "_patch_builtin",
            "_implicit_cvt",
            "_patch_lang",
            "_patch_lang_tensor",
        )
    ),
    *(
        Private(
            (name,), f"triton.runtime.interpreter:GridExecutor.{name}", "raises where the proof begins", None, "triton"
        )
        for name in ("_init_args_hst", "_restore_args_dev")
    ),
    Private(
        ("_compute_loss", "_metrics", "_total_train_tokens", "_tp_size", "_entropy_bonus_enabled"),
        None,
        "the losses of examples/ are not compared with trl's: that test fails",
    ),
    Private(("_get_per_token_logps_and_entropies",), None, "the same"),
    # Of another kernel package, for its own sake: a name that it lacks is one that it does not use.
    Private(("_liger_kernel_available", "_apply_liger_kernel_to_instance"), None, "the flags of trl find nothing"),
)
