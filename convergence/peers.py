"""What users would pick instead, each patched as its own documentation says: ``python -m convergence peers DIR``.

Every function here is a patch, as ``--patch convergence.peers:NAME`` takes it. One returns the model that its package
makes, which takes the place of the one that it was given. A package is imported when its patch is
called, in the candidate's own process. What a package has no answer for is refused ("cannot run"), never computed by
other means. A package that has a head, and no patch of models, gets the forward of :func:`_with_head`.
"""

from __future__ import annotations

import functools
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from convergence import patches

IGNORE = -100


@dataclass(frozen=True)
class Peer:
    """A row of the table: a patch, where it comes from, and how its documentation has it."""

    name: str
    patch: str
    distribution: str
    how: str


def liger_kernel(model: Any) -> None:
    patches.liger_kernel_instance(model)


def cce_patch(model: Any) -> None:
    from cut_cross_entropy.transformers import cce_patch as patch

    patch(model)


def cce(model: Any) -> None:
    from cut_cross_entropy import linear_cross_entropy

    if model.get_output_embeddings().bias is not None:
        raise NotImplementedError("linear_cross_entropy takes no bias")

    def loss(hidden: Any, head: Any, targets: Any, reduction: str, softcap: float | None) -> Any:
        return linear_cross_entropy(hidden, head.weight, targets, softcap=softcap, reduction=reduction)

    _with_head(model, loss)


def trl(model: Any) -> None:
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model)
    with_head = model.forward

    def forward(self: Any, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        import torch
        from transformers.modeling_outputs import CausalLMOutputWithPast

        if labels is None or not torch.is_grad_enabled():
            return with_head(*args, labels=labels, **kwargs)
        kwargs.pop("use_cache", None)
        return CausalLMOutputWithPast(loss=with_head(*args, labels=labels, fused_lm_head=True, **kwargs).loss)

    model.forward = types.MethodType(functools.wraps(type(model).forward)(forward), model)


def fla(model: Any) -> None:
    from fla.modules import FusedLinearCrossEntropyLoss, GatedMLP, RMSNorm

    if model.config.model_type.startswith("gemma"):
        raise NotImplementedError("its RMSNorm has no offset, and its GatedMLP no GELU")
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module).__name__.endswith("RMSNorm"):
                new = RMSNorm(module.weight.numel(), eps=module.variance_epsilon)
            elif {"gate_proj", "up_proj", "down_proj"} == {*dict(module.named_children())} - {"act_fn"}:
                new = GatedMLP(module.gate_proj.in_features, intermediate_size=module.gate_proj.out_features)
            else:
                continue
            for own, value in [*module._parameters.items(), *module._modules.items()]:
                if own in dict(new.named_parameters(recurse=False)) or own in dict(new.named_children()):
                    setattr(new, own, value)
            setattr(parent, name, new.train(module.training))

    def loss(hidden: Any, head: Any, targets: Any, reduction: str, softcap: float | None) -> Any:
        criterion = FusedLinearCrossEntropyLoss(reduction=reduction, logit_softcapping=softcap)
        return criterion(hidden, targets, head.weight, head.bias)

    _with_head(model, loss)


def torch_head(model: Any) -> None:
    import torch
    import torch.nn.functional as F

    if not hasattr(F, "linear_cross_entropy"):
        raise NotImplementedError(f"torch {torch.__version__} has no linear_cross_entropy")

    def loss(hidden: Any, head: Any, targets: Any, reduction: str, softcap: float | None) -> Any:
        options = torch.nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(
            hidden, head.weight, targets, linear_bias=head.bias, reduction=reduction, options=options
        )

    if getattr(model.config, "final_logit_softcapping", None):
        raise NotImplementedError("linear_cross_entropy takes no softcap")
    _with_head(model, loss)


def torch_compile(model: Any) -> None:
    model.compile()


def use_kernels(model: Any) -> None:
    model.use_kernels = True


def axolotl(model: Any) -> None:
    if not hasattr(model, "peft_config"):
        raise NotImplementedError("its kernels are for the adapters of PEFT: --setups lora-single")
    from axolotl.monkeypatch.lora_kernels import apply_lora_kernel_patches, patch_self_attn_lora
    from axolotl.utils.dict import DictDefault

    base = model.get_base_model()
    base.config.architectures = [type(base).__name__]
    with tempfile.TemporaryDirectory() as folder:  # it reads the architecture of a model from its folder
        base.config.save_pretrained(folder)
        kernels = dict.fromkeys(("lora_qkv_kernel", "lora_o_kernel", "lora_mlp_kernel"), True)
        options = DictDefault(base_model=folder, **kernels)
        patch_self_attn_lora(options)
        apply_lora_kernel_patches(model, options)


def unsloth(model: Any) -> Any:
    """The model that its loader makes of a folder on disk, with the same weights."""
    from unsloth import FastLanguageModel

    if hasattr(model, "peft_config"):
        raise NotImplementedError("its adapters are those of its own get_peft_model")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        _save_tokenizer(model.config.get_text_config().vocab_size, folder)
        made, _ = FastLanguageModel.from_pretrained(
            model_name=folder,
            max_seq_length=model.config.get_text_config().max_position_embeddings,
            dtype=model.dtype,
            load_in_4bit=False,
            full_finetuning=True,
            use_gradient_checkpointing=False,
            device_map={"": str(model.device)},
        )
    made.load_state_dict(model.state_dict())
    return made.train(model.training)


def _save_tokenizer(tokens: int, folder: str) -> None:
    """A tokenizer of as many words, for a loader that wants one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    names = [*special.values(), *(f"t{n}" for n in range(tokens - len(special)))]
    raw = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token=special["unk_token"]))
    PreTrainedTokenizerFast(tokenizer_object=raw, **special).save_pretrained(folder)


def _with_head(model: Any, loss: Callable[..., Any]) -> None:
    """In training with labels, ``model`` returns ``loss(hidden, head, targets, reduction, softcap)`` and no logits."""
    import torch
    from torch.nn import functional as F
    from transformers.modeling_outputs import CausalLMOutputWithPast

    unfused = model.forward
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def forward(self: Any, *args: Any, labels: Any = None, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        if labels is None or not torch.is_grad_enabled():
            counted = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
            return unfused(*args, labels=labels, **counted, **kwargs)
        hidden = self.base_model(*args, **kwargs).last_hidden_state.flatten(0, 1)
        targets = F.pad(labels, (0, 1), value=IGNORE)[:, 1:].flatten()
        head = self.get_output_embeddings()
        if num_items_in_batch is None:
            return CausalLMOutputWithPast(loss=loss(hidden, head, targets, "mean", softcap))
        return CausalLMOutputWithPast(loss=loss(hidden, head, targets, "sum", softcap) / num_items_in_batch)

    model.forward = types.MethodType(functools.wraps(type(model).forward)(forward), model)


_ROWS = (
    Peer("liger-kernel", "liger_kernel", "liger-kernel", "`_apply_liger_kernel_to_instance(model=model)`"),
    Peer(
        "cut-cross-entropy, its patch",
        "cce_patch",
        "cut-cross-entropy",
        "`cut_cross_entropy.transformers.cce_patch(model)`",
    ),
    Peer("cut-cross-entropy, its loss", "cce", "cut-cross-entropy", "`linear_cross_entropy(hidden, weight, targets)`"),
    Peer(
        "trl's head",
        "trl",
        "trl",
        "`trl.trainer.utils.add_fused_lm_head(model)`, called with `fused_lm_head=True` as its trainers do",
    ),
    Peer(
        "fla's modules",
        "fla",
        "flash-linear-attention",
        "`RMSNorm` and `GatedMLP` in place of the model's, and `FusedLinearCrossEntropyLoss`",
    ),
    Peer("torch's head", "torch_head", "torch", "`F.linear_cross_entropy(..., options=LinearCrossEntropyOptions())`"),
    Peer("torch.compile", "torch_compile", "torch", "`model.compile()`"),
    Peer("transformers' kernels", "use_kernels", "kernels", "`model.use_kernels = True`"),
    Peer(
        "axolotl's LoRA kernels",
        "axolotl",
        "axolotl",
        "`patch_self_attn_lora(cfg)` and `apply_lora_kernel_patches(model, cfg)`, with all three kernels",
    ),
    Peer("unsloth", "unsloth", "unsloth", "`FastLanguageModel.from_pretrained(folder, full_finetuning=True)`"),
)
PEERS = {f"convergence.peers:{row.patch}": row for row in _ROWS}
