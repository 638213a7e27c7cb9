"""liger-kernel 0.8.5: the bias of an LM head is not in the loss, and gets no gradient."""

import copy

import torch
from liger_kernel.transformers import _apply_liger_kernel_to_instance
from transformers import LlamaConfig, LlamaForCausalLM

device = "cuda" if torch.cuda.is_available() else "cpu"  # there with TRITON_INTERPRET=1
only_the_loss = {"rms_norm": False, "rope": False, "swiglu": False}
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
model = LlamaForCausalLM(config)
model.lm_head = torch.nn.Linear(64, 256, bias=True)
torch.nn.init.normal_(model.lm_head.bias)
model = model.to(device)
patched = copy.deepcopy(model)
ids = torch.randint(256, (2, 32), device=device)
for name in ("unpatched", "patched"):
    if name == "patched":
        _apply_liger_kernel_to_instance(model=patched, **only_the_loss)
        model = patched
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    print(name, "loss", float(loss), "gradient of the bias:", model.lm_head.bias.grad is not None)
