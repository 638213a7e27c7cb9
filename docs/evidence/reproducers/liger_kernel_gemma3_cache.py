"""liger-kernel 0.8.5: Gemma 3's logits are others where it decodes with a cache."""

import torch
from liger_kernel.transformers import _apply_liger_kernel_to_instance
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig

config = Gemma3TextConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip
model = Gemma3ForCausalLM(config).cuda().eval()
ids = torch.randint(256, (2, 12), device="cuda")
found = []
for name in ("unpatched", "patched"):
    if name == "patched":
        _apply_liger_kernel_to_instance(model=model)
    with torch.no_grad():
        cache = model(input_ids=ids[:, :7], past_key_values=DynamicCache(config=config), use_cache=True).past_key_values
        logits = [model(input_ids=t, past_key_values=cache, use_cache=True).logits for t in ids[:, 7:].split(1, 1)]
    found.append(torch.cat(logits, 1))
print("largest difference", float((found[0] - found[1]).abs().max()), "of logits", float(found[0].abs().max()))
