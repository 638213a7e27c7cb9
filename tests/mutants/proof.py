"""Faults of the proof itself, each with the test that must fail."""

from __future__ import annotations

from tests.mutants.mutant import faults

_compare = faults("convergence.judge.compare", "test_convergence_compare.py")
_border = faults("convergence.border", "test_convergence_border.py")
_isolate = faults("convergence.arms.isolate", "test_convergence_border.py")
_arms = faults("convergence.judge.arms", "test_convergence_border.py")
_kept = faults("convergence.kept", "test_convergence_border.py")
_lifetimes = faults("convergence.arms.lifetimes", "test_convergence_isolation.py")
_layout = faults("convergence.arms.candidate", "test_convergence_isolation.py")
_process = faults("convergence.arms.process", "test_convergence_isolation.py")
_blocks = faults("convergence.arms.interpreter.blocks", "test_interpreter_blocks.py")
_causal = faults("convergence.arms.tasks.causal_lm", "test_convergence_power.py")

_IN_HOOK = "test_a_fault_in_a_hook_is_seen_by_the_statistic_that_is_meant_for_it"
_STATE_DICT = "test_what_a_patch_changes_in_the_state_dict_is_named"
_BLOCK = "test_a_large_block_is_loaded_and_stored_as_by_triton[{}]"
_PROCESS = "test_what_a_patch_of_one_model_changes_for_the_whole_process_fails[{}]"

# fmt: off
MUTANTS = (
    _compare("c26_nan_passes", "The proof counts a NaN as no difference.",
        "not bool(torch.isfinite(got[step]).all())", "bool(torch.isinf(got[step]).any())",
        "test_a_gradient_that_cannot_be_judged_fails[NaN]", source="C26", sample=True),
    faults("convergence.arms.quantities")("h1_threshold_inverted", "The proof passes what is above the bound.",
        "return self.value <= self.bound  # a NaN fails", "return self.value >= self.bound",
        "test_convergence_compare.py::test_honest_noise_passes", source="H1"),
    _compare("n17_candidate_against_itself", "The proof compares the candidate with itself.",
        "truth, baseline = pairs[0]\ncomparable = yield from check_presence(pairs, candidate, foreign)",
        "pairs = [(candidate, candidate)] * len(pairs)\n<old>",
        "test_one_gradient_scaled_by_one_percent_fails_by_its_gain", source="N17"),
    _compare("t8_zeros_compared_with_zeros", "The proof accepts a gradient of zeros.",
        "all(bool(arm.values[quantity][step].any()) for _, arm in pairs)", "False",
        "test_a_gradient_that_cannot_be_judged_fails[zeros]", source="T8"),
    _compare("t2_same_factor_in_both_arms",
        "The proof looks at the direction of a gradient only, so that a common factor cancels.",
        "off, size = a - t, t.square().sum(1)", "a = a * ((t * t).sum(1) / (a * t).sum(1))[:, None]\n<old>",
        "test_one_gradient_scaled_by_one_percent_fails_by_its_gain", source="T2"),
    _compare("figures_of_other_arms", "A candidate is judged by the noise of arms that another one was judged by.",
        "key not in known or known[key][0] != which", "key not in known",
        "test_what_was_measured_of_other_arms_is_not_taken"),
    _compare("gain_over_all_ways_of_running", "The gain in decoding is averaged with that of all evaluations.",
        "(step.step,) if step.step in (DECODING, EVALUATION, WITHOUT_GRADIENTS) else ()", "()",
        "test_what_is_scaled_in_one_way_of_running_alone_fails_by_its_gain[decoding-dtype1]"),
    _compare("row_judged_by_the_size_of_the_others", "The error of a row is measured by the mean size of all rows.",
        "torch.where(size > 0, size, mean)", "mean",
        "test_one_small_row_among_many_fails_by_its_own_size[lost-dtype1]"),
    _causal("prompts_of_one_length", "No prompt that is decoded begins with padding.",
        "(places >= torch.arange(len(ids), device=ids.device).unsqueeze(1)).long()", "torch.ones_like(ids)",
        f"{_IN_HOOK}[rope_of_the_first_row_in_decoding-row error ratio-llama-untied-float32]"),
    _causal("no_forward_before_a_backward", "No forward comes between another one and its backward.",
        "step.between is not None", "False",
        f"{_IN_HOOK}[norm_keeps_its_state_in_the_module-error ratio-llama-untied-float32]"),
    faults("convergence.arms.train", "test_convergence_power.py")("gradients_in_training_mode_alone",
        "No gradient is asked for in evaluation mode.", "model.eval()", "pass",
        f"{_IN_HOOK}[gradient_too_large_in_evaluation-gain-llama-untied-float32]"),
    faults("convergence.op.command", "test_convergence_op.py")("end_of_an_op_taken_for_its_verdict",
        "An op that ends its process is equal.", "return DIFFERENT", "return EQUAL",
        "test_an_op_that_ends_its_process_is_different[ends_at_once-1-the process of the op ended before it "
        "was judged, with exit code 0]", within="reported"),
    _layout("state_dict_without_its_memory", "Weights of the state_dict that became one, or no longer are, go unseen.",
        "first.setdefault(_memory(value), name)", "name", f"{_STATE_DICT}[splits_a_weight-shown5]"),
    _layout("state_dict_read_before_training_only", "What a forward adds to the state_dict is not seen.",
        "_differences(_layout(run.template, run.dtype), _layout(trajectory.model), 'after training')", "[]",
        f"{_STATE_DICT}[adds_a_buffer_later-shown2]"),
    _lifetimes("tensor_watched_and_not_its_memory", "Who keeps an alias of the logits goes unseen.",
        "StorageWeakRef(value.untyped_storage()).expired", "(lambda r: lambda: r() is None)(weakref.ref(value))",
        "test_what_a_patch_keeps_of_a_step_is_named[keeps_logits-the logits stayed after the step]"),
    _arms("baseline_returned_by_who_launches_for_the_count", "Who launches kernels may have every bit of the baseline.",
        "summed and bitwise.is_same(candidate, pairs[0][1])", "False",
        "test_who_launched_a_sum_has_not_every_bit_of_the_baseline"),
    faults("convergence.judge.verdict", "test_convergence_compare.py")("inflated_bound",
        "A bound is not compared with what honest arms have.", "not bound <= limit", "False",
        "test_a_bound_that_no_honest_arm_comes_near_is_refused"),
    _compare("proof_ignores_what_is_missing", "The proof judges what both arms have, and nothing else.",
        'yield Failure.of(quantity, step, Finding.MISSING, "it never arrived")', "pass",
        "test_a_gradient_that_cannot_be_judged_fails[missing in one step]", source="T8"),
    _process("process_settings_not_compared", "A patch may change a switch of torch for every model.",
        "value != self._settings[name]", "False", _PROCESS.format(
            "switches_benchmarks_on-torch.backends.cudnn.benchmark (False before, True now)")),
    _process("process_variables_not_compared", "A patch may set variables of the environment.",
        "self._environment.get(name) != os.environ.get(name)", "False",
        _PROCESS.format("sets_a_variable-the variable TOKENIZERS_PARALLELISM")),
    _process("process_symbols_not_compared", "A patch may replace functions of torch that no model of the proof runs.",
        "after.get(name) is not value", "False", _PROCESS.format("replaces_a_function-torch.svd")),
    _process("process_hooks_not_compared", "A patch may hook every module of the process.",
        "name.endswith('_hooks')", "name.endswith('_hook')", _PROCESS.format("hooks_all_modules-hooks of all modules")),
    _process("process_draws_not_compared", "A patch may seed the generators that belong to all.",
        "_random() != before", "False",
        _PROCESS.format("seeds-random numbers, which the patch drew or set")),
    _border("border_field_of_any_type", "What a patch's process sends may have a field of any type.",
        "_fits(getattr(made, field), kind)", "True", "test_a_field_of_another_type_is_refused"),
    _border("border_objects_of_any_class", "An object of any class leaves a process as what its fields are.",
        "_classes().get(name) is not kind", "False", "test_what_unpickles_to_code_does_not_cross"),
    _isolate("border_result_of_another_call", "A result is taken for that of the call that waits.",
        "(of, at) == (call_id, number)", "True", "test_a_result_of_another_call_is_refused"),
    _arms("border_replica_as_candidate", "A candidate may be an honest arm, bit for bit.",
        "bitwise.is_same(candidate, other)", "False", "test_a_replica_is_no_candidate"),
    _kept("kept_file_that_changed", "References are read, whatever was written over them.",
        "digest and _digest(data) != digest", "False",
        "test_convergence_kept.py::test_a_file_that_changed_is_not_read"),
    _kept("kept_file_of_another_process", "References are read that another process made since the run began.",
        "not _trusts and file.name not in _digests", "False",
        "test_convergence_kept.py::test_what_another_process_made_since_the_run_began_is_not_read"),
    _kept("kept_file_not_watched", "A patch may write to references while it runs.",
        "state != before[file]", "False", "test_references_that_a_patch_overwrites"),
    _blocks("interpreter_stores_where_elements_overlap", "Of two values for one place, the first may stay.",
        "found is None or not found[2]", "found is None", _BLOCK.format("overlapping-fp32")),
    _blocks("interpreter_takes_any_mask_for_a_corner", "A block is copied also where its mask is false.",
        "count == 0 or math.prod(lengths) != count or (not mask[place].all())", "count == 0",
        _BLOCK.format("contiguous-fp32")),
    faults("convergence.op.launched", "test_convergence_op.py")("op_that_fills_by_a_mask_waits",
        "A number that is written by a mask counts as a wait.",
        "writes_a_number and len(given) == 1", "False", "test_an_honest_op_passes_all_checks[WritesANumberByAMask]"),
)
