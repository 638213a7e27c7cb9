"""Faults of the recognisers and of what a patched module does where it cannot run its kernel."""

from __future__ import annotations

from tests.mutants.mutant import faults

_probe = faults("patching.recipes.probe", "test_patching_probes.py")
_glu = faults("patching.recipes.glu", "test_patching_recognise.py")
_rotary = faults("patching.recipes.rotary", "test_patching_rotary.py")
_recogniser = faults("patching.recipes.recogniser", "test_patching_probes.py")

# fmt: off
MUTANTS = (
    _probe("probe_under_inference_mode", "A probe computes in inference mode where patch() is called in it.",
        "stack.enter_context(torch.inference_mode(False))", "pass",
        "test_what_is_set_around_the_patch_does_not_reach_the_probes[inference_mode]"),
    _probe("probe_calls_the_hooks_of_every_module", "A probe calls the hooks that the user has put on every module.",
        'module.__dict__["_compiled_call_impl"] = module.forward', "", "test_no_hook_sees_a_probe"),
    _glu("probe_misses_a_clamp", "A gated MLP is probed on usual numbers only, which no clamp changes.",
        "(2.0, 1e3)", "(1.0, 1.0)", "test_other_mlps_are_refused[clamps what is large]"),
    _glu("activation_past_its_hooks", "The gated MLP computes the activation although somebody has hooks on it.",
        "skips_watched(self, called)", "False",
        "test_patching_left.py::test_hooks_on_the_activation_are_called_as_unpatched[forward]"),
    _probe("sharded_norm_of_unknown_size", "A norm whose weight ZeRO-3 has sharded is taken for one of no elements.",
        "if whole is not None:\n    return tuple(whole)", "",
        "test_patching_left.py::test_a_norm_that_zero_3_has_sharded_is_probed_at_its_own_size"),
    _rotary("unrecognised_rotary_function_not_listed",
        "Of two rotary functions the one that is not recognised is not in the report.",
        "RopeRecipe(rotations, reasons)", "RopeRecipe(rotations)",
        "test_of_two_rotary_functions_the_one_that_is_refused_is_listed"),
    _rotary("every_attention_counts_as_rotated",
        "Every attention counts as one whose kernel has run, whether it rotates or not.",
        "runs[0] != ran", "True", "test_patching_left.py::test_attention_that_does_not_rotate_never_ran"),
    _probe("probe_misses_dropout_in_evaluation_mode",
        "The modules inside an MLP are probed in the mode of the model, so that dropout shows in training only.",
        'state["training"] = not _evaluation[0]', "pass",
        "test_patching_recognise.py::test_other_mlps_are_refused[dropout in a module]"),
    _probe("probe_moves_running_statistics",
        "A probe shares the buffers of the module, and moves the statistics of a batch norm.",
        'buffer.detach().to("cpu", copy=True)', "buffer", "test_a_probe_changes_no_running_statistics"),
    _recogniser("verdict_shared_past_a_buffer",
        "An MLP is replaced as another one was whose activation has other buffers.",
        "(module._parameters, module._buffers)", "(module._parameters,)",
        "test_modules_that_may_compute_something_else_differ_in_their_fingerprints[buffer]"),
    _recogniser("verdict_shared_past_what_is_inside",
        "Of the modules inside an MLP only the class tells what it computes.",
        "fingerprint(child)", "type(child)",
        "test_modules_that_may_compute_something_else_differ_in_their_fingerprints[settings]"),
)
