"""Faults of a patched model in the set-ups of its users: threads, readers of its logits, hooks, wrappers, sharding."""

from __future__ import annotations

from tests.mutants.mutant import faults

_lazy = faults("patching.lazy", "test_setups_reading.py")
_head = faults("patching.head", "test_setups_hooks.py")
_model = faults("patching.model", "test_setups_evaluation.py")
_product = faults("patching.product", "test_setups_hooks.py")
_split_head = faults("patching.split_head", "test_setups_sharded.py")

# fmt: off
MUTANTS = (
    _lazy("lazy_gradient_dropped", "A loss of the logits that the caller reads gives the model no gradient.",
        "return grad", "return None", "test_a_loss_of_logits_and_the_models_own[llama]", within="_Reserved.backward"),
    _lazy("lazy_gradient_doubled", "A loss of the logits that the caller reads gives the model twice its gradient.",
        "return grad", "return grad if grad is None else 2 * grad",
        "test_a_loss_of_logits_and_the_models_own[llama]", within="_Reserved.backward"),
    faults("patching.running")("forward_of_another_thread",
        "The state of a forward is one for all threads, so that one thread's forward is taken for another's.",
        "threading.local", "object", "test_setups_hooks.py::test_a_training_and_a_serving_thread"),
    _lazy("users_read_taken_for_a_walkers",
        "A user who reads the logits is taken for code that passes an output on, and gets a tensor without a value.",
        'return module.startswith(_WALKERS) or module == "dataclasses"', "return True",
        "test_logits_that_are_kept_over_an_optimizer_step"),
    _lazy("lazy_graph_not_kept",
        "A backward pass that retains its graph frees the one behind the logits that were read.",
        'graph = {"retain_graph": keep}', 'graph = {"retain_graph": False}', "test_two_passes_over_one_graph"),
    _lazy("lazy_second_derivative_dropped",
        "The gradient of logits that were read counts as a constant when it is differentiated again.",
        "torch.is_grad_enabled()", "False", "test_second_derivatives_of_logits[llama]", within="Computation.gradients"),
    _head("spectral_norm_read_twice",
        "The fused loss reads the head's weight twice, and a parametrisation iterates once more.",
        "return request.answer(args[0], weight, bias)", "return request.answer(args[0], self.weight, bias)",
        "test_setups_reading.py::test_a_spectral_norm_of_the_head_iterates_once_a_step[spectral_norm1-before]"),
    _lazy("stale_logits_computed", "Logits that were never computed are computed from weights that have changed since.",
        "here and self.versions != [t._version for t in self.tensors]", "False",
        "test_patching_outputs.py::test_logits_of_weights_that_have_changed_are_refused"),
    _model("evaluation_computes_logits",
        "A forward without gradients computes its logits, whether anybody reads them or not.",
        "output[name] = value.released()", "<old> if torch.is_grad_enabled() else value.materialize(None)",
        "test_a_forward_with_labels[no_grad]"),
    _head("backward_hook_on_the_head_ignored",
        "The head does not compute its logits although a hook on it expects their gradient.",
        "module._backward_hooks or module._backward_pre_hooks or any_user_hook([module._forward_hooks])",
        "any_user_hook([module._forward_hooks])",
        "test_a_hook_on_the_head_that_changes_what_it_sees[register_full_backward_hook-double_input_gradient]"),
    _head("hook_on_all_modules_ignored",
        "The head does not compute its logits although a hook on every module expects them.",
        "any_user_hook(_GLOBAL_HOOKS)", "False", "test_a_hook_on_all_modules[forward_hook]"),
    faults("patching.running", "test_setups_hooks.py")("request_left_after_an_error",
        "A loss that raises, out of memory for example, leaves its request for whoever calls the head next.",
        "try:\n    return outer(hidden)\nfinally:\n    running.forward, running.request = before",
        "result = outer(hidden)\nrunning.forward, running.request = before\nreturn result",
        "test_an_exception_in_a_forward_leaves_nothing_behind[lm_head]"),
    _model("new_head_not_healed", "A head that is set on a patched model stays as it came.",
        "before and isinstance(head, nn.Module) and recipe_of(head) is None", "False",
        "test_setups_wrapped.py::test_resized_embeddings_stay_fused[False]"),
    faults("patching")("patch_is_not_atomic", "A patch that is interrupted leaves the modules that it has replaced.",
        "restore(undo)\nraise", "raise", "test_setups_wrapped.py::test_an_interruption_undoes_everything"),
    _product("sharded_head_past_its_wrapper",
        "The fused loss calls the head and not what wraps it, which gathers its weights.",
        "answer = call_head(self.outer, self.hidden, request)", "answer = call_head(self.head, self.hidden, request)",
        "test_setups_sharded.py::test_training[fsdp1 of linear layers-before]"),
    _split_head("split_head_taken_for_whole", "A head that a tensor parallel plan splits is taken for any other.",
        "any(module_of(function).startswith(_PLANS) for function in _around(head))", "False",
        "test_training[head by columns-after]"),
    _split_head("split_head_not_tried", "What a tensor parallel plan makes of the logits is not tried.",
        "why = _try(head, part)", "why = None", "test_training[head by columns, loss parallel-before]"),
)
