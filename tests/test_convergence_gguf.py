"""The proof on a real GGUF file: a tiny Llama, written here as llama.cpp's converter writes one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from convergence.models import gguf_file
from convergence.models.checkpoint import Checkpoint
from convergence.models.checkpoint_check import check
from convergence.models.data import default_text
from convergence.models.models import MODELS
from convergence.report.records import load_folder
from convergence.trainers.material import VOCABULARY, tokenizer
from tests.suite import assert_refused, suite

# Rows of whole blocks of 32.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, n_blocks=2)
SMALL = ("--device", "cpu", "--rows", "3", "--length", "24", "--steps", "3", "--layers", "1", "--no-blame")


def model() -> Any:
    overrides = {**MODELS["llama-untied"].overrides, **SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 128}
    return dataclasses.replace(MODELS["llama-untied"], overrides=overrides).build(0)


def stored(name: str, weight: torch.Tensor, config: Any) -> tuple[str, np.ndarray]:
    """llama.cpp's name of a weight, and its values. The two halves that a rotation pairs are interleaved there."""
    values = weight.detach().numpy()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads:
        values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    return NAMES.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(values)


def write(path: Path, kind: str, parts: int = 1) -> Path:
    """The model with its matrices as ``kind``; the norms are float32, as in every file of llama.cpp's."""
    source, own = model(), tokenizer()
    config, file = source.config, gguf.GGUFWriter(str(path), "llama")
    file.add_name("tiny")
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    file.add_vocab_size(config.vocab_size)
    tokens = [token for token, _ in sorted(own.get_vocab().items(), key=lambda item: item[1])]
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("default")
    file.add_token_list(tokens)
    file.add_token_types([gguf.TokenType.CONTROL if t in own.all_special_tokens else 1 for t in tokens])
    file.add_token_merges([" ".join(pair) for pair in json.loads(own.backend_tokenizer.to_str())["model"]["merges"]])
    file.add_bos_token_id(own.bos_token_id)
    file.add_eos_token_id(own.eos_token_id)
    if parts > 1:
        file.add_uint16("split.count", parts)
    for weight in source.state_dict().items():
        name, values = stored(*weight, config)
        if values.ndim > 1:
            into = gguf.GGMLQuantizationType[kind]
            file.add_tensor(name, gguf.quants.quantize(values, into), raw_dtype=into)
        else:
            file.add_tensor(name, values)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    return {kind: write(folder / f"{kind}.gguf", kind) for kind in ("F32", "F16", "Q8_0", "Q4_0")}


@pytest.mark.parametrize(
    ("kind", "dtype", "default", "step"),
    [
        ("F32", torch.float32, "float32", 0.0),
        ("F16", torch.float16, "bfloat16", 2**-11),
        ("Q8_0", torch.float32, "bfloat16", 2**-8),  # half of the largest of 32 numbers over 127
        ("Q4_0", torch.float32, "bfloat16", 2**-3),  # the largest over 8
    ],
)
def test_it_loads_the_weights_that_were_written(files, short_text, kind, dtype, default, step):
    row = Checkpoint(str(files[kind]), text=short_text)
    check(row, ["float32", "bfloat16"], "cpu")
    assert (row.saved_in(), row.default_dtype()) == (dtype, default)
    assert bool(row.notes()) == kind.startswith("Q")
    got = row.build(0).state_dict()
    for name, weight in model().state_dict().items():
        assert got[name].dtype is dtype
        off = (got[name].float() - weight).abs().max() / weight.abs().max()
        assert off <= step + 2**-11, name
        assert (kind == "F32" or weight.ndim == 1) or off > 0, "it was not quantized"


def test_its_tokens_are_those_of_the_tokenizer_that_was_written(files):
    (batch,) = Checkpoint(str(files["Q8_0"]), rows=1, length=100).data("text", 0, torch.float32)[0][0].batches
    tokens = tokenizer()(default_text(), add_special_tokens=False, verbose=False)["input_ids"]
    wanted, got = " ".join(map(str, tokens)), " ".join(map(str, batch.input_ids[0].tolist()))
    assert got in wanted


def test_our_patch_is_equal_on_its_weights(files: dict[str, Path], tmp_path: Path) -> None:
    options = ("--patch", "convergence.patches:fused_linear", "--dtypes", "bfloat16", "--records", str(tmp_path))
    code = suite("--checkpoint", str(files["Q4_0"]), *SMALL, *options)
    (record,) = load_folder(tmp_path)
    assert code == 0, record.reason
    assert (record.dtype, record.profile, record.truth) == ("bfloat16", "text", "float64")
    assert record.census["linear_cross_entropy"] == 1
    assert "weights of Q4_0 were dequantized to float32, and train as such" in record.notes


UNREADABLE = "is no GGUF file that can be read here"


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda raw: b"", (UNREADABLE, "cannot mmap an empty file")),
        (lambda raw: b"{}" * 100, (UNREADABLE, "magic")),
        (lambda raw: raw[:3000], (UNREADABLE,)),
        (lambda raw: raw[:-5000], (UNREADABLE,)),
        (lambda raw: raw.replace(b"llama", b"lxama"), (UNREADABLE, "lxama")),
        (lambda raw: raw.replace(b"block_count", b"block_cxunt"), ("make num_hidden_layers 32", "have 2")),
        (lambda raw: raw.replace(b"embedding_length", b"embedding_lexgth"), ("make hidden_size", "have 64")),
        (lambda raw: raw.replace(b"ggml.tokens", b"ggml.toxens"), ("has no tokenizer", "into the file")),
    ],
)
def test_a_bad_file_is_a_usage_error_before_anything_is_trained(files, tmp_path, capfd, change, shown):
    path = tmp_path / "bad.gguf"
    path.write_bytes(change(files["F32"].read_bytes()))
    assert_refused(capfd, (str(path), *shown), "--device", "cpu", "--checkpoint", str(path), "--length", "32")


def test_a_weight_that_it_lacks_is_named(files, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(files["F32"].read_bytes().replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"))
    with pytest.raises(ValueError, match=r"1 weights are missing: model\.layers\.1\.self_attn\.q_proj\.weight"):
        Checkpoint(str(path)).build(0)


def test_a_weight_that_it_lacks_is_a_usage_error_when_it_is_loaded(files, short_text, tmp_path, capfd):
    path = tmp_path / "bad.gguf"
    path.write_bytes(files["F32"].read_bytes().replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"))
    options = ("--patch", "convergence.patches:fused_linear", "--dtypes", "float32", "--text", short_text)
    assert suite("--checkpoint", str(path), *SMALL, *options) == pytest.ExitCode.USAGE_ERROR
    said = "".join(capfd.readouterr())
    assert f"{path}: 1 weights are missing: model.layers.0.self_attn.q_proj.weight" in said
    assert "Traceback" not in said


def test_one_of_several_files_is_a_usage_error(tmp_path, capfd):
    path = write(tmp_path / "a-00001-of-00002.gguf", "F32", parts=2)
    assert_refused(capfd, ["is one of 2 files"], "--device", "cpu", "--checkpoint", str(path))


def test_its_memory_is_that_of_the_dequantized_weights(files):
    plans = {kind: Checkpoint(str(files[kind])).plan("bfloat16", "cpu").host for kind in ("F16", "F32", "Q4_0")}
    assert plans["F16"] < plans["F32"] == plans["Q4_0"]


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_nothing_stays_in_blocks_where_kernels_would_take_them(files, monkeypatch, kind):
    if not hasattr(transformers, "GgufConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no GgufConfig and always dequantizes")
    given, load = {}, transformers.AutoModelForCausalLM.from_pretrained
    loader = transformers.AutoModelForCausalLM
    monkeypatch.setattr(loader, "from_pretrained", lambda *args, **how: given.update(how) or load(*args, **how))
    Checkpoint(str(files[kind])).build(0)
    assert given["quantization_config"].dequantize
    assert gguf_file.read(str(files[kind])).dtype is given["torch_dtype"]
