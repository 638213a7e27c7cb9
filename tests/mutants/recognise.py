"""Faults of the recognisers and of what a patched module does where it cannot run its kernel."""

from __future__ import annotations

from tests.mutants.edit import Edit
from tests.mutants.mutant import Mutant

_PATCHING = "liger_kernels.patching"


def _check(name: str, does: str, file: str, old: str, new: str, check: str, within: str = "") -> Mutant:
    return Mutant(
        name, does, (Edit(f"{_PATCHING}.{file}", old, new, within),), check=f"tests/test_patching_{check}", dies="test"
    )


# fmt: off
MUTANTS = (
    _check("probe_under_inference_mode", "A probe computes in inference mode where patch() is called in it.",
        "probe", "stack.enter_context(torch.inference_mode(False))", "pass",
        "recognise.py::test_what_is_set_around_the_patch_does_not_reach_the_probes[inference_mode]"),
    _check("probe_calls_the_hooks_of_every_module", "A probe calls the hooks that the user has put on every module.",
        "probe", '    module.__dict__["_compiled_call_impl"] = module.forward\n', "",
        "recognise.py::test_no_hook_sees_a_probe"),
    _check("probe_misses_a_clamp", "A gated MLP is probed on usual numbers only, which no clamp changes.",
        "glu", "(2.0, 1e3)", "(1.0, 1.0)", "recognise.py::test_other_mlps_are_refused[clamps what is large]"),
    _check("activation_past_its_hooks", "The gated MLP computes the activation although somebody has hooks on it.",
        "glu", "left_to_inductor(recipe.kernel, x) or skips_watched(self, called)",
        "left_to_inductor(recipe.kernel, x)", "left.py::test_hooks_on_the_activation_are_called_as_unpatched[forward]"),
    _check("sharded_norm_of_unknown_size", "A norm whose weight ZeRO-3 has sharded is taken for one of no elements.",
        "probe", "    if whole is not None:\n        return tuple(whole)\n", "",
        "left.py::test_a_norm_that_zero_3_has_sharded_is_probed_at_its_own_size"),
    _check("unrecognised_rotary_function_not_listed",
        "Of two rotary functions the one that is not recognised is not in the report.",
        "rotary", "RopeRecipe(rotations, reasons)", "RopeRecipe(rotations)",
        "rotary.py::test_of_two_rotary_functions_the_one_that_is_refused_is_listed"),
    _check("every_attention_counts_as_rotated",
        "Every attention counts as one whose kernel has run, whether it rotates or not.",
        "rotary", "runs[0] != before", "True", "left.py::test_attention_that_does_not_rotate_never_ran"),
    _check("probe_misses_dropout_in_evaluation_mode",
        "The modules inside an MLP are probed in the mode of the model, so that dropout shows in training only.",
        "probe", 'copied.__dict__["training"] = True', "pass",
        "recognise.py::test_other_mlps_are_refused[dropout in a module]"),
    _check("probe_moves_running_statistics",
        "A probe shares the buffers of the module, and moves the statistics of a batch norm.",
        "probe", "None if buffer is None else buffer.clone()", "buffer",
        "recognise.py::test_a_probe_changes_no_running_statistics"),
    _check("verdict_shared_past_a_buffer", "An MLP is replaced as another one was whose activation has other buffers.",
        "recogniser", "(module._parameters, module._buffers)", "(module._parameters,)",
        "recognise.py::test_modules_that_may_compute_something_else_differ_in_their_fingerprints[buffer]"),
    _check("verdict_shared_past_what_is_inside", "Of the modules inside an MLP only the class tells what it computes.",
        "recogniser", "fingerprint(child)", "type(child)",
        "recognise.py::test_modules_that_may_compute_something_else_differ_in_their_fingerprints[settings]"),
)
