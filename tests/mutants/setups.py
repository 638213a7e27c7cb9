"""Faults of a patched model in the set-ups of its users: threads, readers of its logits, hooks, wrappers, sharding."""

from __future__ import annotations

from tests.mutants.edit import Edit
from tests.mutants.mutant import Mutant

_PATCHING = "liger_kernels.patching"
_GRADIENT = "return grad"


def _check(
    name: str, does: str, file: str, old: str, new: str, check: str, within: str = "", sample: bool = False
) -> Mutant:
    module = f"{_PATCHING}.{file}" if file else _PATCHING
    return Mutant(
        name, does, (Edit(module, old, new, within),), check=f"tests/test_setups_{check}", dies="test", sample=sample
    )


# fmt: off
MUTANTS = (
    _check("lazy_gradient_dropped", "A loss of the logits that the caller reads gives the model no gradient.",
        "lazy", _GRADIENT, "return None", "reading.py::test_a_loss_of_logits_and_the_models_own[llama]"),
    _check("lazy_gradient_doubled", "A loss of the logits that the caller reads gives the model twice its gradient.",
        "lazy", _GRADIENT, "return 2 * grad", "reading.py::test_a_loss_of_logits_and_the_models_own[llama]"),
    _check("forward_of_another_thread",
        "The state of a forward is one for all threads, so that one thread's forward is taken for another's.",
        "running", "threading.local", "object", "hooks.py::test_a_training_and_a_serving_thread"),
    _check("users_read_taken_for_a_walkers",
        "A user who reads the logits is taken for code that passes an output on, and gets a tensor without a value.",
        "lazy", 'return module.startswith(_WALKERS) or module == "dataclasses"', "return True",
        "reading.py::test_logits_that_are_kept_over_an_optimizer_step"),
    _check("lazy_graph_not_kept",
        "A backward pass that retains its graph frees the one behind the logits that were read.",
        "lazy", 'graph = {"retain_graph": keep}', 'graph = {"retain_graph": False}',
        "reading.py::test_two_passes_over_one_graph"),
    _check("lazy_second_derivative_dropped",
        "The gradient of logits that were read counts as a constant when it is differentiated again.",
        "lazy", "torch.is_grad_enabled()", "False", "reading.py::test_second_derivatives_of_logits[llama]",
        within="Computation.gradients"),
    _check("spectral_norm_read_twice",
        "The fused loss reads the head's weight twice, and a parametrisation iterates once more.",
        "head", "return request.answer(args[0], weight, bias)", "return request.answer(args[0], self.weight, bias)",
        "reading.py::test_a_spectral_norm_of_the_head_iterates_once_a_step[spectral_norm1-before]"),
    Mutant("stale_logits_computed",
        "Logits that were never computed are computed from weights that have changed since.",
        (Edit(f"{_PATCHING}.lazy", "here and self.versions != [t._version for t in self.tensors]", "False"),),
        check="tests/test_patching_outputs.py::test_logits_of_weights_that_have_changed_are_refused", dies="test"),
    _check("evaluation_computes_logits",
        "A forward without gradients computes its logits, whether anybody reads them or not.",
        "model", "output[name] = value.released()",
        "output[name] = value.released() if torch.is_grad_enabled() else value.materialize(None)",
        "evaluation.py::test_a_forward_with_labels[no_grad]"),
    _check("backward_hook_on_the_head_ignored",
        "The head does not compute its logits although a hook on it expects their gradient.",
        "head", "module._backward_hooks or module._backward_pre_hooks or any_user_hook([module._forward_hooks])",
        "any_user_hook([module._forward_hooks])",
        "hooks.py::test_a_hook_on_the_head_that_changes_what_it_sees[register_full_backward_hook-double_input_gradient]",
    ),
    _check("hook_on_all_modules_ignored",
        "The head does not compute its logits although a hook on every module expects them.",
        "head", "any_user_hook(_GLOBAL_HOOKS)", "False",
        "hooks.py::test_a_hook_on_all_modules[forward_hook]"),
    _check("request_left_after_an_error",
        "A loss that raises, out of memory for example, leaves its request for whoever calls the head next.",
        "product", "try:\n    return outer(hidden)\nfinally:\n    running.forward, running.request = before",
        "result = outer(hidden)\nrunning.forward, running.request = before\nreturn result",
        "hooks.py::test_an_exception_in_a_forward_leaves_nothing_behind[lm_head]"),
    _check("new_head_not_healed", "A head that is set on a patched model stays as it came.",
        "model", "recipes and isinstance(head, nn.Module) and recipe_of(head) is None", "False",
        "wrapped.py::test_resized_embeddings_stay_fused[False]"),
    _check("patch_is_not_atomic", "A patch that is interrupted leaves the modules that it has replaced.",
        "", "        restore(undo)\n        raise\n", "        raise\n",
        "wrapped.py::test_an_interruption_undoes_everything"),
    _check("sharded_head_past_its_wrapper",
        "The fused loss calls the head and not what wraps it, which gathers its weights.",
        "product", "answer = call_head(self.outer, self.hidden, request)",
        "answer = call_head(self.head, self.hidden, request)",
        "sharded.py::test_training[fsdp1 of linear layers-before]"),
    _check("split_head_taken_for_whole", "A head that a tensor parallel plan splits is taken for any other.",
        "split_head", "any(module_of(function).startswith(_PLANS) for function in _around(head))", "False",
        "sharded.py::test_training[head by columns-after]"),
    _check("split_head_not_tried", "What a tensor parallel plan makes of the logits is not tried.",
        "split_head", "why = _try(head, part)", "why = None",
        "sharded.py::test_training[head by columns, loss parallel-before]"),
)
