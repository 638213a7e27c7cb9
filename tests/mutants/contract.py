"""Faults of the patch: what it puts where, what it leaves alone, what it passes on, what it gives back."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.mutants.edit import Edit
from tests.mutants.mutant import Mutant, until_restored

_MODEL = "liger_kernels.patching.model"
_DEFERRED = "liger_kernels.patching.deferred"
_PRODUCT = "liger_kernels.patching.product"
_NORMS = "liger_kernels.patching.norms"
_GLU = "liger_kernels.patching.glu"
_PATCH = "liger_kernels.patching"
_MODULES = "liger_kernels.patching.modules"


def _edited(name: str, does: str, module: str, old: str, new: str, within: str = "", **other: Any) -> Mutant:
    return Mutant(name, does, (Edit(module, old, new, within),), **other)


def _scale_gradient(path: str, factor: float) -> Any:
    def after(model: Any) -> None:
        model.get_parameter(path).register_hook(lambda grad: grad * factor)

    return after


def _poison_gradient(model: Any) -> None:
    def poison(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad.view(-1)[grad.numel() // 2] = float("nan")
        return grad

    model.get_parameter("model.layers.1.mlp.down_proj.weight").register_hook(poison)


def _drop_gradient(model: Any) -> None:
    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    model.get_parameter("model.layers.1.mlp.down_proj.weight").register_post_accumulate_grad_hook(drop)


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
    """Every other Llama of the process gets the forward of this model's norm."""
    patched = type(model.model.norm)
    cls = patched.__mro__[1]
    original = cls.forward  # type: ignore[attr-defined]
    cls.forward = patched.forward  # type: ignore[attr-defined]
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
_BEFORE = "        before = running.forward\n        state = None\n"
_OUTSIDE_OF_TRAINING = "        if labels is None or not self.training:\n"
_RELEASE = "if labels is None or (state is None and not accuracy):\n    return output\n"
_DOWN = "model.layers.1.mlp.down_proj.weight"
_NORM = "model.layers.0.input_layernorm.weight"


def _kwargs(change: str) -> str:
    return f"return base.forward(self, *args, **{{{change}}})"


# fmt: off
MUTANTS = (
    Mutant("p1_weights_initialised_again", "The patch builds an MLP anew and loses its weights.",
        source="P1", after=_instantiate_anew),
    Mutant("p2_patch_does_nothing", "The patch returns as if it had patched.",
        source="P2", after=_unpatches, dies="not patched", sample=True),
    _edited("p2_report_without_a_patch", "Every subclass is made and no module is given its own.",
        f"{_PATCH}.swap", "        module.__class__ = cls = patched_class(base, recipe)",
        "        cls = patched_class(base, recipe)", source="P2", dies="not patched"),
    Mutant("p3_torchs_loss_stays_replaced",
        "torch.nn.functional.cross_entropy is another function for the whole process.",
        source="P3", after=_replaces_torchs_loss, dies="patched too"),
    Mutant("p4_patches_the_class", "Every other model of the family in this process is patched, too.",
        source="P4", after=_patches_the_class, dies="patched too", dtypes=("float32", "bfloat16")),
    _edited("p8_all_arguments_forwarded", "The fused loss is given an argument that it does not know.",
        _DEFERRED, 'options["class_weight"] = options.pop("weight")', 'options["class_weight"] = options["weight"]',
        source="P8", dies="raised"),
    _edited("p9_position_ids_dropped", "The patched forward passes no position_ids on.",
        _MODEL, _FORWARD, _kwargs('k: v for k, v in kwargs.items() if k != "position_ids"'), within=_UPSTREAM,
        source="P9"),
    _edited("attention_mask_dropped", "The patched forward passes no attention_mask on.",
        _MODEL, _FORWARD, _kwargs('k: v for k, v in kwargs.items() if k != "attention_mask"'), within=_UPSTREAM,
        source="P9"),
    _edited("a1_num_items_dropped", "The patched forward passes no num_items_in_batch on: a mean of means.",
        _MODEL, _FORWARD, _kwargs('k: v for k, v in kwargs.items() if k != "num_items_in_batch"'), within=_UPSTREAM,
        source="A1"),
    _edited("a2_num_items_applied_twice", "Where the caller divides by num_items_in_batch, the loss is a mean already.",
        _DEFERRED, 'options["class_weight"] = options.pop("weight")',
        'options["class_weight"] = options.pop("weight")\noptions["reduction"] = "mean"', source="A2"),
    _edited("p12_labels_shifted_again", "The labels are shifted once more than upstream has shifted them.",
        _PRODUCT, "weight, self.targets, bias, ", "weight, self.targets.roll(-1), bias, ", source="P12"),
    _edited("ignore_index_ignored", "The ignore_index of the caller is not passed on, and -100 becomes class 0.",
        _PRODUCT, "linear_cross_entropy(hidden, weight, self.targets, bias, **how, **self.options)",
        "linear_cross_entropy(hidden, weight, self.targets.clamp(min=0), bias, **how | {'counted': None}, "
        "**self.options)",
        source="C27"),
    _edited("labels_across_packed_documents", "The last token of a packed document learns the first one of the next.",
        _MODEL, _FORWARD,
        'position_ids, ids, labels = kwargs.get("position_ids"), kwargs["input_ids"], kwargs.get("labels")\n'
        "if position_ids is not None and labels is not None:\n"
        '    kwargs["labels"] = torch.where(position_ids == 0, ids, labels)\n' + _FORWARD, within=_UPSTREAM),
    _edited("p10_generation_without_positions", "Outside of training, position_ids and the mask are not passed on.",
        _MODEL, _BEFORE,
        _BEFORE + _OUTSIDE_OF_TRAINING + '            kwargs["position_ids"] = torch.zeros_like(kwargs["input_ids"])\n',
        source="P10"),
    _edited("p10_stale_signature", "The patched forward does not know an argument that generate() passes.",
        _MODEL, _BEFORE,
        '        if kwargs.get("past_key_values") is not None:\n'
        "            raise TypeError(\"forward() got an unexpected keyword argument 'past_key_values'\")\n" + _BEFORE,
        source="P10", dies="raised"),
    _edited("evaluation_loss_of_another_reduction", "In evaluation the loss is the sum over the tokens.",
        _MODEL, _RELEASE,
        "if labels is not None and not self.training:\n    output.loss = output.loss * labels.ne(-100).sum()\n"
        + _RELEASE),
    _edited("c11_loss_without_gradients_crashes",
        "Under no_grad the fused head reads a variable that only the gradient's branch sets.",
        "liger_kernels.ops._linear_token_chunks", "sums.add(call, wanted, start, stop, logits)",
        "if not any(call.needs):\n"
        "    raise UnboundLocalError(\"cannot access local variable 'd_weight'\")\n"
        "sums.add(call, wanted, start, stop, logits)", source="C11", kernel="linear_cross_entropy", phase="forward",
        dies="raised"),
    _edited("logits_read_after_the_loss_are_uncapped",
        "Logits that the caller reads after the loss are the raw product, without the model's soft-cap.",
        _DEFERRED, "result = product.tensor()", "return product.tensor()", model="gemma2"),
    _edited("logits_read_after_the_loss_are_detached",
        "Logits that the caller reads after the loss are those of the next token.",
        _PRODUCT, "return logits_of_all(hidden, weight, bias, shard)",
        "return logits_of_all(hidden, weight, bias, shard).roll(1, -2)"),
    Mutant("evaluation_logits_of_another_dtype", "Outside of training the logits are float64.",
        after=_float32_logits, dies="dtype"),
    _edited("n8_attribute_missing", "A patched module reads an attribute that the patch forgot to set.",
        _NORMS, "            return rms_norm(x, weight, eps, formula=formula)",
        "            return rms_norm(x, weight, self.row_mode, formula=formula)", source="N8, N9", dies="raised"),
    Mutant("n11_one_norm_of_another_formula", "One norm of Gemma 2 is given Llama's formula.",
        source="N11", after=_llama_norm_in_one_place, model="gemma2"),
    _edited("recognised_as_the_wrong_activation", "silu is taken for gelu.",
        _GLU, "(swiglu, swiglu_linear)", "(geglu, geglu_linear)"),
    _edited("p17_only_the_first_layer_patched", "The patch leaves the second layer alone.",
        _MODULES, "        name = type(module).__name__\n",
        '        name = type(module).__name__\n        if "layers.1." in path:\n            continue\n', source="P17",
        dies="not patched"),
    Mutant("p17_a_layer_lost_its_patch", "The second layer is as it was, though the report lists it.",
        source="P17", after=_unpatches_a_layer, dies="not patched"),
    Mutant("r4_angles_rounded_with_the_model", "The rotary frequencies are rounded to bfloat16 with the parameters.",
        source="R4", after=_embeds_in_bfloat16),
    Mutant("gradient_of_one_percent_more", "One parameter's gradient is 1% too large.",
        after=_scale_gradient(_DOWN, 1.01), sample=True),
    Mutant("norm_gradient_of_one_percent_more", "One norm's gradient is 1% too large.",
        after=_scale_gradient(_NORM, 1.01)),
    Mutant("gradient_with_a_nan", "One element of one gradient is NaN.", after=_poison_gradient, dies="finite"),
    Mutant("gradient_missing", "One parameter gets no gradient.", after=_drop_gradient, dies="missing"),
    _edited("schedule_dropped_on_the_way", "The schedule that the patch was asked for never reaches the fused loss.",
        _PRODUCT, "self.product.memory, self._counted()", "None, self._counted()",
        check="tests/test_patching_memory.py::test_what_was_chosen_runs_and_is_the_same", dies="test"),
    _edited("bias_of_the_logits_dropped", "What a model adds to its logits is not in the fused loss.",
        _PRODUCT, "added if bias is None else bias + added", "bias",
        check="tests/test_patching_outputs.py::test_the_bias_of_a_sequence_to_sequence_model_is_fused",
        dies="test"),
    _edited("bias_under_the_scale", "What a model adds to scaled logits is scaled, too.",
        _DEFERRED, "self._scale == 1.0", "True",
        check="tests/test_patching_outputs.py::test_what_a_model_does_to_its_logits[bias after a scale]", dies="test"),
    _edited("bias_narrowed", "What a model adds to its logits is rounded to their dtype.",
        _DEFERRED, "torch.promote_types(self._dtype, bias.dtype) == self._dtype", "True",
        check="tests/test_patching_outputs.py::test_a_bias_that_is_wider_than_the_logits_is_added_in_its_dtype",
        dies="test"),
    _edited("factors_of_an_adapter_passed_over",
        "An adapter whose only parameter multiplies what the head computes is opened, and its loss is multiplied.",
        "liger_kernels.patching.head", "linears if not own and len(sizes) == 1 else []",
        "linears if len(sizes) == 1 else []",
        check="tests/test_patching_adapters.py::test_adapters[factors on the head-adapter first]", dies="test"),
    _edited("computed_logits_of_all_classes",
        "Where the head computes its logits, the loss is one of the classes, too, that the model leaves out.",
        _PRODUCT, "rows(logits, self.views)[..., : self.vocabulary]", "rows(logits, self.views)",
        check="tests/test_patching_outputs.py::test_what_a_model_does_to_its_logits[first classes]", dies="test"),
    _edited("mask_of_logits_taken_for_rows", "A mask of single logits is taken for one of rows.",
        _DEFERRED, "index.shape == self._shape[:-1]", "True",
        check="tests/test_patching_outputs.py::test_what_a_model_does_to_its_logits[mask of logits]", dies="test"),
    _edited("schedule_replaced_in_silence", "A step that could not run the schedule that was asked for is not counted.",
        _DEFERRED, "reason is not None", "False", within="DeferredLogits.cross_entropy",
        check="tests/test_patching_memory.py::test_a_step_that_cannot_take_it_runs_balanced_and_is_counted",
        dies="test"),
)
