"""Faults of the patch: what it puts where, what it leaves alone, what it passes on, what it gives back."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F

from tests.convergence_faults import SCALED, drop_gradient, poison_gradient, scale_gradient
from tests.mutants.mutant import Mutant, faults, until_restored

_deferred = faults("patching.logits.deferred", "test_patching_outputs.py")
_model = faults("patching.logits.model")
_product = faults("patching.logits.product", "test_patching_outputs.py")


def _instantiate_anew(model: Any) -> None:
    layer = model.model.layers[0]
    fresh = type(layer.mlp).__mro__[1](model.config)
    weight = next(layer.mlp.parameters())
    layer.mlp = fresh.to(weight.device, weight.dtype).train(layer.training)


def _llama_norm_in_one_place(model: Any) -> None:
    from liger_kernels.ops import rms_norm

    norm = model.model.layers[1].post_feedforward_layernorm
    norm.forward = lambda x: rms_norm(x, norm.weight, norm.eps, formula="cast_then_scale")


def _patches_the_class(model: Any) -> None:
    """Every other Llama of the process gets the kernel of this model's norm."""
    from liger_kernels.ops import rms_norm

    cls: Any = type(model.model.norm).__mro__[1]
    original = cls.forward
    cls.forward = lambda self, x: rms_norm(x, self.weight, self.variance_epsilon)
    until_restored(lambda: setattr(cls, "forward", original))


def _replaces_torchs_loss(model: Any) -> None:
    original = F.cross_entropy

    def cross_entropy(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    F.cross_entropy = cross_entropy
    until_restored(lambda: setattr(F, "cross_entropy", original))


def _unpatches(model: Any) -> None:
    import liger_kernels

    liger_kernels.unpatch(model)


def _unpatches_a_layer(model: Any) -> None:
    for module in model.model.layers[1].modules():
        if hasattr(type(module), "_liger_kernels_recipe"):
            module.__class__ = type(module).__mro__[1]


def _float32_logits(model: Any) -> None:
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, output: output if module.training else output.double())


def _embeds_in_bfloat16(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq = module.inv_freq.bfloat16().float()


_UPSTREAM = "_plain.upstream"
_FORWARD = "return base.forward(self, *args, **kwargs)"
_BEFORE = "before = running.forward\nstate = None\n"

# fmt: off
MUTANTS = (
    Mutant("p1_weights_initialised_again", "The patch builds an MLP anew and loses its weights.",
        source="P1", after=_instantiate_anew),
    Mutant("p2_patch_does_nothing", "The patch returns as if it had patched.",
        source="P2", after=_unpatches, dies="not patched", sample=True),
    faults("patching.swap")("p2_report_without_a_patch", "Every subclass is made and no module keeps its own.",
        "return True", "module.__class__ = base\nreturn True", within="replace", source="P2", dies="not patched"),
    Mutant("p3_torchs_loss_stays_replaced",
        "torch.nn.functional.cross_entropy is another function for the whole process.",
        source="P3", after=_replaces_torchs_loss, dies="patched too"),
    Mutant("p4_patches_the_class", "Every other model of the family in this process is patched, too.",
        source="P4", after=_patches_the_class, dies="patched too"),
    _deferred("p8_all_arguments_forwarded", "The fused loss is given an argument that it does not know.",
        'options["class_weight"] = options.pop("weight")', 'options["class_weight"] = options["weight"]', source="P8",
        dies="raised"),
    _model("p9_position_ids_dropped", "The patched forward passes no position_ids on.",
        _FORWARD, "kwargs.pop('position_ids', None)\n<old>", within=_UPSTREAM, source="P9"),
    _model("attention_mask_dropped", "The patched forward passes no attention_mask on.",
        _FORWARD, "kwargs.pop('attention_mask', None)\n<old>", within=_UPSTREAM, source="P9"),
    _model("a1_num_items_dropped", "The patched forward passes no num_items_in_batch on: a mean of means.",
        _FORWARD, "kwargs.pop('num_items_in_batch', None)\n<old>", within=_UPSTREAM, source="A1"),
    _deferred("a2_num_items_applied_twice",
        "Where the caller divides by num_items_in_batch, the loss is a mean already.",
        'options["class_weight"] = options.pop("weight")', '<old>\noptions["reduction"] = "mean"', source="A2"),
    _product("p12_labels_shifted_again", "The labels are shifted once more than upstream has shifted them.",
        "weight, self.targets, bias, ", "weight, self.targets.roll(-1), bias, ", source="P12"),
    _product("ignore_index_ignored", "The ignore_index of the caller is not passed on, and -100 becomes class 0.",
        "linear_cross_entropy(hidden, weight, self.targets, bias, **how, **self.options)",
        "linear_cross_entropy(hidden, weight, self.targets.clamp(min=0), bias, **how | {'counted': None}, "
            "**self.options)", source="C27"),
    _model("labels_across_packed_documents", "The last token of a packed document learns the first one of the next.",
        _FORWARD, 'position_ids, ids, labels = kwargs.get("position_ids"), kwargs["input_ids"], kwargs.get("labels")\n'
            "if position_ids is not None and labels is not None:\n"
            '    kwargs["labels"] = torch.where(position_ids == 0, ids, labels)\n<old>', within=_UPSTREAM),
    _model("p10_generation_without_positions", "Outside of training, position_ids and the mask are not passed on.",
        _BEFORE, "<old>if labels is None or not self.training:\n"
            "    kwargs['position_ids'] = torch.zeros_like(kwargs['input_ids'])", source="P10"),
    _model("p10_stale_signature", "The patched forward does not know an argument that generate() passes.",
        _BEFORE, "if kwargs.get('past_key_values') is not None:\n"
            "    raise TypeError(\"forward() got an unexpected keyword argument 'past_key_values'\")\n<old>",
        source="P10", dies="raised"),
    _model("evaluation_loss_of_another_reduction", "In evaluation the loss is the sum over the tokens.",
        "if (labels is None and not (state is not None and state.gathers)) or (state is None and not accuracy):\n"
            "    return output",
        "if labels is not None and not self.training:\n"
            "    output.loss = output.loss * labels.ne(-100).sum()\n<old>"),
    faults("ops.loss.schedules.token_chunks")("c11_loss_without_gradients_crashes",
        "Under no_grad the fused head reads a variable that only the gradient's branch sets.",
        "sums.add(call, wanted, start, stop, logits, self.invariant)", "if not any(call.needs):\n"
            "    raise UnboundLocalError(\"cannot access local variable 'd_weight'\")\n<old>", source="C11",
        kernel="linear_cross_entropy", phase="forward", dies="raised"),
    _deferred("logits_read_after_the_loss_are_uncapped",
        "Logits that the caller reads after the loss are the raw product, without the model's soft-cap.",
        "result = product.tensor()", "<old>\nreturn result", model="gemma2"),
    _product("logits_read_after_the_loss_are_detached",
        "Logits that the caller reads after the loss are those of the next token.",
        "return logits_of_all(hidden, weight, bias, shard, invariant)", "<old>.roll(1, -2)"),
    Mutant("evaluation_logits_of_another_dtype", "Outside of training the logits are float64.",
        after=_float32_logits, dies="dtype"),
    faults("patching.recipes.norms")("n8_attribute_missing",
        "A patched module reads an attribute that the patch forgot to set.",
        "rms_norm(x, weight, eps, formula=formula)", "rms_norm(x, weight, self.row_mode, formula=formula)",
        source="N8, N9", dies="raised"),
    Mutant("n11_one_norm_of_another_formula", "One norm of Gemma 2 is given Llama's formula.",
        source="N11", after=_llama_norm_in_one_place, model="gemma2"),
    faults("patching.recipes.glu")("recognised_as_the_wrong_activation", "silu is taken for gelu.",
        "_UNITS[recipe.activation]", "_UNITS[recipe.activation.replace('silu', 'gelu_tanh')]",
        within="_run"),
    faults("patching.modules")("p17_only_the_first_layer_patched", "The patch leaves the second layer alone.",
        "name = type(module).__name__", "<old>\nif 'layers.1.' in path:\n    continue", source="P17",
        dies="not patched"),
    Mutant("p17_a_layer_lost_its_patch", "The second layer is as it was, though the report lists it.",
        source="P17", after=_unpatches_a_layer, dies="not patched"),
    Mutant("r4_angles_rounded_with_the_model", "The rotary frequencies are rounded to bfloat16 with the parameters.",
        source="R4", after=_embeds_in_bfloat16),
    Mutant("gradient_of_one_percent_more", "One parameter's gradient is 1% too large.",
        after=partial(scale_gradient, path=SCALED), sample=True),
    Mutant("norm_gradient_of_one_percent_more", "One norm's gradient is 1% too large.",
        after=partial(scale_gradient, path="model.layers.0.input_layernorm.weight")),
    Mutant("gradient_with_a_nan", "One element of one gradient is NaN.", after=poison_gradient, dies="finite"),
    Mutant("gradient_missing", "One parameter gets no gradient.", after=drop_gradient, dies="missing"),
    _product("schedule_dropped_on_the_way", "The schedule that the patch was asked for never reaches the fused loss.",
        "self.product.memory", "None",
        "test_patching_memory.py::test_what_was_chosen_runs_and_is_the_same"),
    _product("bias_of_the_logits_dropped", "What a model adds to its logits is not in the fused loss.",
        "added if bias is None else bias + added", "bias",
        "test_the_bias_of_a_sequence_to_sequence_model_is_fused"),
    _deferred("bias_under_the_scale", "What a model adds to scaled logits is scaled, too.",
        "self._scale == 1.0", "True", "test_what_a_model_does_to_its_logits[bias after a scale]"),
    _deferred("bias_narrowed", "What a model adds to its logits is rounded to their dtype.",
        "torch.promote_types(self.dtype, bias.dtype) == self.dtype", "True",
        "test_a_bias_that_is_wider_than_the_logits_is_added_in_its_dtype"),
    faults("patching.logits.lazy")("functions_gradient_lost",
        "An autograd.Function of logits that are computed later gets a value, and passes no gradient on.",
        "node.kept = self._computation", "pass",
        "test_patching_functions.py::test_of_a_forward_without_labels[function]", within="LazyTensor.computed"),
    _deferred("function_inside_a_forward_not_refused",
        "An autograd.Function that gets logits inside a model's own forward cuts their gradient off.",
        "_function_of(frame)", "None",
        "test_patching_functions.py::test_a_function_inside_a_models_own_forward_is_refused[fused]"),
    _deferred("contiguous_forgotten", "A part of the logits that was made contiguous is not, once it is computed.",
        'self._then("contiguous", ())', "self",
        "test_patching_functions.py::test_a_flat_contiguous_part_inside_a_models_own_forward"),
    faults("patching.logits.head")("weight_lent_for_a_call_passed_over",
        "A head that PEFT lends another weight for its call is opened, and its loss is that of its own weight.",
        'outer is not head and not isinstance(head._parameters.get("weight"), nn.Parameter)', "False",
        "test_patching_adapted_head.py::test_a_weight_that_is_there_for_a_call_is_the_one_of_the_loss[scaled]"),
    faults("patching.logits.head")("factors_of_an_adapter_passed_over",
        "An adapter whose only parameter multiplies what the head computes is opened, and its loss is multiplied.",
        "linears if not own and len(sizes) == 1 else []", "linears if len(sizes) == 1 else []",
        "test_patching_adapters.py::test_adapters[factors on the head-adapter first]"),
    _product("computed_logits_of_all_classes",
        "Where the head computes its logits, the loss is one of the classes, too, that the model leaves out.",
        "rows(logits, self.views)[..., : self.vocabulary]", "rows(logits, self.views)",
        "test_what_a_model_does_to_its_logits[first classes]"),
    _deferred("mask_of_logits_taken_for_rows", "A mask of single logits is taken for one of rows.",
        "index.shape == self.shape[:-1]", "True", "test_what_a_model_does_to_its_logits[mask of logits]"),
    _deferred("schedule_replaced_in_silence",
        "A step that could not run the schedule that was asked for is not counted.",
        "reason is not None", "False",
        "test_patching_memory.py::test_a_step_that_cannot_take_it_runs_balanced_and_is_counted",
        within="DeferredLogits.cross_entropy"),
)
