"""Faults of what moves layer inputs to the host's memory and back."""

from __future__ import annotations

from tests.mutants.mutant import faults

_offload = faults("patching.offload", "test_patching_offload.py")
_fit = faults("fitting.stand_in", "test_fit.py")
_NUMBERS = "test_the_same_numbers_and_every_copy_is_waited_for[False]"
_WAIT = "self.pool.stream.wait(self.event)"

# fmt: off
MUTANTS = (
    _offload("offload_source_freed_early", "An input is freed before its copy to the host has ended.",
        _WAIT, "None", _NUMBERS, within="Input.finish_offload"),
    _offload("offload_read_before_the_prefetch_ended", "An input is read before its copy to the GPU has ended.",
        _WAIT, "None", _NUMBERS, within="Input.unpack"),
    _offload("offload_buffer_still_in_use", "The host's memory of an input is given to the next one.",
        "self.tensor = self.version = self.event = None", "<old>; self.pool.release(self.host)", _NUMBERS),
    _offload("offload_buffer_stays_in_the_free_list", "A buffer that is acquired stays in the free list.",
        "self.free.pop(i)", "self.free[i]", _NUMBERS),
    _offload("offload_change_in_place_unnoticed", "An input that was changed in place is copied as it is then.",
        "self.tensor._version != self.version", "False",
        "test_an_input_that_is_changed_in_place_is_an_error_as_it_is_without"),
    _offload("offload_weight_changed_in_place_unnoticed", "A weight that was changed in place is read as it is then.",
        "self._check()", "pass", "test_a_weight_that_is_changed_in_place_is_an_error_as_it_is_without",
        within="Saved.unpack"),
    _offload("offload_strides_lost", "What comes back is contiguous, whatever it was.",
        "torch.empty_strided(shape, stride, dtype=dtype, device=device)",
        "torch.empty(shape, dtype=dtype, device=device)", "test_strides_come_back"),
    _offload("offload_of_parameters", "A parameter is copied, which lies in memory anyway.",
        "isinstance(x, nn.Parameter)", "False", "test_small_inputs_and_parameters_stay"),
    _offload("offload_of_masks", "What every layer is given is copied for each of them.",
        "not x.requires_grad", "False", "test_what_all_layers_are_given_stays"),
    _offload("offload_of_all_that_is_saved", "Whatever autograd saves outside of the layers is copied, too.",
        "not _is_input()", "False", _NUMBERS),
    _offload("offload_memory_never_used_again", "Every step takes new memory of the host.",
        "bisect.insort(self.free, memory, key=_size)", "pass", "test_memory_of_the_host_is_used_again"),
    _offload("offload_three_inputs_stay", "The copy of an input begins a layer too late.",
        "on_gpu[:-1]", "on_gpu[:-2]", "test_at_most_two_inputs_stay", times=2),
    _offload("offload_over_hooks_of_others", "Hooks on saved tensors of somebody else are replaced.",
        "saved_tensors_hooks(True) is not None", "False", "test_hooks_of_others_stay_alone"),
    _offload("offload_without_checkpointing_in_silence", "Where nothing is moved, nobody is told.",
        "not count", "False", "test_without_checkpointing_it_is_counted_and_said_once"),
    _fit("fit_copies_for_nobody", "While a step is calculated, no GPU's layer inputs are copied in other threads.",
        "device.type == 'meta'", "True", "test_other_devices_copy_as_always_meanwhile"),
    _fit("fit_attention_without_its_result", "The result of attention is not counted while its backward runs.",
        "q, k, v, out, log_sums, mask = ctx.saved_tensors",
        "q, k, v, _, _, mask = ctx.saved_tensors; out = log_sums = 0",
        "test_attention_reads_its_result_in_the_backward"),
)
# fmt: on
