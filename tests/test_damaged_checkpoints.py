"""``pytest convergence --checkpoint`` on what may be anything: a usage error before anything is built, which names the
file, and nothing outside of it is read or run."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from convergence import plugin
from convergence.models import checkpoint
from convergence.models.checkpoint import Checkpoint
from convergence.trainers.material import save
from tests import damaged
from tests.damaged import HOSTILE, RAW, controls, put
from tests.suite import assert_refused, collect
from tests.test_convergence_gguf import write

LAYER = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "llama"
    save("llama", folder)
    return folder


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "good.gguf", "F32").read_bytes()


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A checkpoint of two layers that the test may damage."""
    return Path(shutil.copytree(good, tmp_path / "llama"))


@pytest.fixture
def refuse(request: pytest.FixtureRequest, short_text: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], str]:
    """``refuse(path)``: what the usage error of ``--checkpoint path`` says; empty where it is none."""
    monkeypatch.setattr(Checkpoint, "build", lambda *_: pytest.fail("it was loaded"))
    given = {"device": "cpu", "dtypes": "float32", "setups": "plain", "text": short_text, "layers": None}
    for name, value in {**given, "length": 32, "rows": 4, "steps": 4}.items():
        monkeypatch.setattr(request.config.option, name, value)

    def refuse(path: Path) -> str:
        for cached in (checkpoint.saved_config, Checkpoint.plan):
            cached.cache_clear()
        monkeypatch.setattr(request.config.option, "checkpoint", str(path))
        began = time.perf_counter()
        try:
            plugin._check_checkpoint(request.config)
            said = ""
        except pytest.UsageError as error:
            said = str(error)
        assert time.perf_counter() - began < 20, "it hung"
        assert len(said) < 1200, said
        assert "\n" not in said
        assert not controls(said), said
        return said

    return refuse


def change(folder: Path, file: str, **fields: Any) -> None:
    """Give fields of a JSON file other values."""
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | fields))


def test_a_good_folder_is_none(folder: Path, refuse: Callable[[Path], str]) -> None:
    assert refuse(folder) == ""


# JSON files of any content.
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_json_that_is_none(file: str, folder: Path, refuse: Callable[[Path], str]) -> None:
    for name, content in RAW.items():
        if name == "object" and file in ("tokenizer_config.json", "generation_config.json"):
            continue  # which is a good one
        put(folder / file, content)
        said = refuse(folder)
        assert str(folder) in said, name
        assert name == "object" or file in said, f"{name}: {said}"


@pytest.mark.parametrize("file", ["special_tokens_map.json", "added_tokens.json", "vocab.json", "chat_template.json"])
def test_json_next_to_it_that_is_none(file: str, folder: Path, refuse: Callable[[Path], str]) -> None:
    for name in ("empty", "binary", "cut", "list", "deep and whole", "directory", "pipe", "half a character"):
        put(folder / file, RAW[name])
        assert str(folder / file) in refuse(folder), name


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else 1


def test_whole_numbers_that_are_no_weight_are_fine(folder: Path, refuse: Callable[[Path], str]) -> None:
    tensors(folder / "model.safetensors", **{"model.layers.0.table": torch.arange(3)})
    assert refuse(folder) == ""


# Values of config.json.
IMPOSSIBLE = (
    -1,
    10**8,
    10**18,
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    "x",
    HOSTILE,
    True,
    {},
    {"a": [1]},
    [[[]], "x"],
)
NONE_OF_THESE = {
    **dict.fromkeys(
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"), (*IMPOSSIBLE, 0, None, [])
    ),
    "intermediate_size": (*IMPOSSIBLE, 0, []),
    "num_key_value_heads": (*IMPOSSIBLE, 0, 4, 5),
    "max_position_embeddings": (-1, 0, 10**400, 1.5, float("nan"), float("inf"), "x", True, {}, [1]),
    "rms_norm_eps": (-1, 10**8, float("nan"), float("inf"), "x", None, True, {}, []),
    "initializer_range": (-1, float("nan"), float("inf"), "x", True, {}),
    "attention_dropout": (-1, 2, float("nan"), float("inf"), "x", True, {}),
    "hidden_act": ("nosuch", HOSTILE, "", 1, None, True, {}, ["silu"]),
    "dtype": ("nosuch", "int8", "float8_e4m3fn", HOSTILE, 1, True, [], "__class__", "load"),
    "model_type": (None, 1, True, [], {}, "", HOSTILE, "nosuch"),
    "architectures": ("Llama", [1], {}, 1, True, ["NoSuch"], [HOSTILE]),
    "rope_parameters": (1, "x", [], {"rope_type": "nosuch", "rope_theta": 1e4}, {"rope_type": [], "rope_theta": 1e4}),
    "num_labels": (-1, 10**9, 1.5, "x"),
    "num_local_experts": (-1, 10**8, "x", 1.5),
    "pad_token_id": (1.5, "x", 10**400, {}, 10**9),
    "head_dim": (-1, 10**18, 1.5, "x", {}, 5),
    "tie_word_embeddings": ("x", 2, [], {}),
    "quantization_config": ({"quant_method": "fp8"}, "x", [1]),
    "configuration_files": (["config.4.0.0.json"], ["config./../../x.json"], "x"),
    "transformers_weights": ("../other.safetensors", "/etc/passwd", "x.safetensors", 1),
    "attn_implementation": ("somebody/kernel", "somebody/kernel@main:function", 1, {"": "a/b"}),
    "pretraining_tp": (-1, 10**8, "x"),
    "sliding_window": (-2, 1.5, "x", {}),
    "transformers_version": (1, [], {}, True),
    "fusion_config": ({"x": True}, 1),
    "get_text_config": (1, "x"),
    "__class__": (1, {}),
    "to_dict": ("x",),
    "attribute_map": ({"hidden_size": "hidden_size"}, 1),
    "_attn_implementation_internal": ("somebody/kernel",),
    "nested": (nested(70), nested(400), nested(900), [nested(200)]),
    "text_config": ({"model_type": "llama", "num_hidden_layers": 10**8}, {"hidden_size": -1}),
}
CHANGES = [(field, value) for field, values in NONE_OF_THESE.items() for value in values]


@pytest.mark.parametrize("field", NONE_OF_THESE)
def test_an_impossible_value_of_config_json(field: str, folder: Path, refuse: Callable[[Path], str]) -> None:
    text = (folder / "config.json").read_text()
    for value in NONE_OF_THESE[field]:
        change(folder, "config.json", **{field: value})
        said = refuse(folder)
        assert str(folder) in said, f"{field} = {value!r:.60}"
        (folder / "config.json").write_text(text)
    assert len(CHANGES) > 150


NAMED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps", "hidden_act", "dtype")


@pytest.mark.parametrize("field", NAMED)
def test_the_field_and_what_came_are_named(field: str, folder: Path, refuse: Callable[[Path], str]) -> None:
    change(folder, "config.json", **{field: {"a": "b"}})
    said = refuse(folder)
    for part in (str(folder / "config.json"), repr(field), "{'a': 'b'} (dict)", "allowed"):
        assert part in said


def test_any_other_value_is_a_usage_error_or_none(folder: Path, refuse: Callable[[Path], str]) -> None:
    """Each field of a configuration that is whole, with values of every type."""
    change(folder, "config.json", sliding_window=None, rope_scaling=None, head_dim=None, layer_types=None)
    raw = json.loads((folder / "config.json").read_text())
    for field in raw:
        for value in (None, -1, 10**8, 1.5, float("nan"), "x", [], ["x"], {"x": {}}):
            change(folder, "config.json", **{field: value})
            refuse(folder)
            (folder / "config.json").write_text(json.dumps(raw))


# Weights and their index.
def header(path: Path, **changes: Any) -> None:
    """Write ``path`` with another header, and the same bytes behind it."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    text = json.dumps(json.loads(raw[8 : 8 + size]) | changes).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


def tensors(path: Path, **changes: Any) -> None:
    """Write ``path`` with other tensors; None takes one away."""
    kept = {name: tensor for name, tensor in (load_file(path) | changes).items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})


WEIGHTS: dict[str, Callable[[Path], Any]] = {
    **{name: lambda path, raw=raw: put(path, raw) for name, raw in RAW.items() if name not in ("directory", "pipe")},
    "cut header": lambda path: path.write_bytes(path.read_bytes()[:50]),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "huge header": lambda path: path.write_bytes(b"\xff" * 8 + b"{}"),
    "largest header": lambda path: path.write_bytes(struct.pack("<Q", 2**63 - 1) + b"{}"),
    "zeros": lambda path: path.write_bytes(bytes(len(path.read_bytes()))),
    "a pickle": lambda path: torch.save({LAYER: torch.ones(3)}, path),
    "header is a list": lambda path: path.write_bytes(struct.pack("<Q", 2) + b"[]"),
    "deep header": lambda path: path.write_bytes(struct.pack("<Q", 10**5) + b"[" * 10**5),
    "no tensors": lambda path: save_file({}, path),
    "another dtype's size": lambda path: header(
        path, **{LAYER: {"dtype": "F64", "shape": [3], "data_offsets": [0, 3]}}
    ),
    "a dtype that is none": lambda path: header(path, **{LAYER: {"dtype": "F7", "shape": [3], "data_offsets": [0, 3]}}),
    "negative offsets": lambda path: header(path, **{LAYER: {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}),
    "a shape that is none": lambda path: header(path, **{LAYER: {"dtype": "F32", "shape": -1, "data_offsets": [0, 4]}}),
    "an overflowing shape": lambda path: header(
        path, **{LAYER: {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}
    ),
    "a tensor is text": lambda path: header(path, **{LAYER: HOSTILE}),
    "another shape": lambda path: tensors(path, **{LAYER: torch.ones(5, 7)}),
    "one dimension": lambda path: tensors(path, **{LAYER: torch.ones(36 * 36)}),
    "a number": lambda path: tensors(path, **{LAYER: torch.ones(())}),
    "transposed": lambda path: tensors(path, **{"lm_head.weight": torch.ones(36, 311)}),
    "whole numbers": lambda path: tensors(path, **{LAYER: torch.ones(36, 36, dtype=torch.int64)}),
    "float8": lambda path: tensors(path, **{LAYER: torch.ones(36, 36).to(torch.float8_e4m3fn)}),
    "bool": lambda path: tensors(path, **{LAYER: torch.ones(36, 36, dtype=torch.bool)}),
    "missing": lambda path: tensors(path, **{LAYER: None}),
    "another name": lambda path: tensors(path, **{LAYER: None, HOSTILE: torch.ones(36, 36)}),
    "renamed": lambda path: path.rename(path.with_name("weights.safetensors")),
    "distributed": lambda path: path.rename(path.with_name("shard-00001-model-00001-of-00002.safetensors")),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_damaged_weights(name: str, folder: Path, refuse: Callable[[Path], str]) -> None:
    WEIGHTS[name](folder / "model.safetensors")
    assert str(folder) in refuse(folder)


INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same in two files."""
    every = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {f"model-0000{i}-of-00002.safetensors": dict(list(every.items())[i - 1 :: 2]) for i in (1, 2)}
    for name, shard in shards.items():
        save_file(shard, folder / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, shard in shards.items() for tensor in shard}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder


def other_shards(folder: Path) -> Iterator[tuple[str, Any]]:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    elsewhere = folder.parent / "elsewhere.safetensors"
    shutil.copy(next(folder.glob("*.safetensors")), elsewhere)
    for name in (
        *(
            1,
            None,
            True,
            [],
            {},
            "",
            ".",
            "..",
            "/",
            "missing.safetensors",
            "config.json",
            "model.bin",
            HOSTILE,
            "a\0b",
        ),
        *(str(elsewhere), "../elsewhere.safetensors", f"../{folder.name}/{next(folder.glob('*.safetensors')).name}"),
        *("./model-00001-of-00002.safetensors", "..\\elsewhere.safetensors", "model-00002-of-00002.safetensors"),
    ):
        yield f"a shard is {name!r:.40}", {"weight_map": weight_map | {LAYER: name}}
    for value in (None, 1, "x", [], {}, [LAYER], True):
        yield f"the map is {value!r}", {"weight_map": value}
    yield "there is no map", {"metadata": {}}
    yield "metadata are a list", {"metadata": [], "weight_map": weight_map}
    yield "a tensor that there is not", {"weight_map": weight_map | {"x": "model-00001-of-00002.safetensors"}}
    yield "only one of the shards", {"weight_map": {k: v for k, v in weight_map.items() if "00001" in v}}


def test_a_damaged_index(sharded: Path, refuse: Callable[[Path], str]) -> None:
    assert refuse(sharded) == ""
    at = next(
        tensor for tensor, name in json.loads((sharded / INDEX).read_text())["weight_map"].items() if "1-" in name
    )
    assert at
    for what, index in other_shards(sharded):
        if what.endswith("'model-00002-of-00002.safetensors'") and LAYER in load_file(
            sharded / "model-00002-of-00002.safetensors"
        ):
            continue
        (sharded / INDEX).write_text(json.dumps(index))
        assert str(sharded) in refuse(sharded), what
    for name, content in RAW.items():
        put(sharded / INDEX, content)
        assert str(sharded) in refuse(sharded), name


# What leads out of the folder.
def link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
def test_a_link_that_leads_out(name: str, folder: Path, good: Path, refuse: Callable[[Path], str]) -> None:
    (folder.parent / "between").symlink_to(good)
    for target in (
        good / name,
        Path(os.path.relpath(good / name, folder)),
        folder.parent / "between" / name,
        Path("/dev/zero"),
        Path("/dev/stdin"),
    ):
        link(folder / name, target)
        assert str(folder / name) in refuse(folder), target


def test_a_link_inside_and_a_link_to_the_folder_are_fine(folder: Path, refuse: Callable[[Path], str]) -> None:
    (folder / "model.safetensors").rename(folder / "stored")
    link(folder / "model.safetensors", Path("stored"))
    assert refuse(folder) == ""
    (folder.parent / "link").symlink_to(folder)
    assert refuse(folder.parent / "link") == ""


def in_cache(folder: Path, repository: str = "models--somebody--llama") -> Path:
    """The folder as the Hub's cache has it."""
    snapshot, blobs = (folder.parent / repository / part for part in ("snapshots/0a1b", "blobs"))
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{i}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    return snapshot


def test_a_snapshot_of_the_hubs_cache_is_fine_and_leads_nowhere_else(
    folder: Path, good: Path, refuse: Callable[[Path], str]
) -> None:
    snapshot = in_cache(folder)
    assert refuse(snapshot) == ""
    (folder.parent / "link").symlink_to(snapshot)
    assert refuse(folder.parent / "link") == ""
    other = in_cache(Path(shutil.copytree(good, folder.parent / "other")), "models--somebody--other")
    link(snapshot / "config.json", other / "config.json")
    assert str(snapshot / "config.json") in refuse(snapshot)
    link(snapshot / "config.json", Path("../../blobs/../../other/config.json"))
    assert str(snapshot / "config.json") in refuse(snapshot)


def test_links_into_blobs_that_are_no_cache(folder: Path, refuse: Callable[[Path], str]) -> None:
    snapshot = in_cache(folder, "somebody--llama")
    assert str(snapshot) in refuse(snapshot)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("adapter_config.json", {"base_model_name_or_path": "/elsewhere", "peft_type": "LORA"}),
        ("adapter_config.json", []),
        *(
            ("tokenizer_config.json", {field: "{elsewhere}"})
            for field in ("tokenizer_file", "vocab_file", "merges_file")
        ),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["tokenizer.json", "../tokenizer.1.0.0.json"]}),
        ("tokenizer_config.json", {"tokenizer_class": "NoSuch", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}),
    ],
)
def test_a_file_that_names_another(file: str, content: Any, folder: Path, refuse: Callable[[Path], str]) -> None:
    elsewhere = Path(shutil.copy(folder / "tokenizer.json", folder.parent / "tokenizer.1.0.0.json"))
    text = json.dumps(content).replace("{elsewhere}", str(elsewhere))
    (folder / "evil.py").write_text(f"open({str(folder.parent / 'ran')!r}, 'w')\n")
    (folder / file).write_text(text)
    assert str(folder) in refuse(folder)
    assert not (folder.parent / "ran").exists()


def test_no_code_of_the_folder_runs(folder: Path, good: Path, gguf: bytes, refuse: Callable[[Path], str]) -> None:
    """Its own architecture is not transformers' own, or is, and its code is there next to it."""
    ran = folder.parent / "ran"
    for name in ("configuration_llama", "modeling_llama", "tokenization_llama"):
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'w')\n")
    of = {"AutoConfig": "configuration_llama.Llama", "AutoModelForCausalLM": "modeling_llama.Llama"}
    change(folder, "config.json", auto_map=of)
    change(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_llama.Llama", None]})
    refuse(folder)
    assert not ran.exists()
    change(folder, "config.json", auto_map=of, model_type="nosuch")
    assert "needs remote code" in refuse(folder)
    change(folder, "config.json", auto_map=of, model_type="deepseek", architectures=["DeepseekForCausalLM"])
    assert refuse(folder)
    assert not ran.exists()
    change(folder, "config.json", **json.loads((good / "config.json").read_text()))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(f"open({str(ran)!r}, 'w')\n")
    (folder / "good.gguf").write_bytes(gguf)
    for path in (folder, folder / "good.gguf"):
        assert str(folder / "custom_generate") in refuse(path)
    assert not ran.exists()


@pytest.mark.parametrize("content", [RAW["binary"], RAW["directory"], RAW["pipe"], b"\xff"])
def test_a_text_that_is_none(
    content: Any, folder: Path, refuse: Callable[[Path], str], request: Any, monkeypatch: Any
) -> None:
    put(folder.parent / "text", content)
    monkeypatch.setattr(request.config.option, "text", str(folder.parent / "text"))
    assert str(folder.parent / "text") in refuse(folder)


# GGUF.
def number(raw: bytes, at: int, value: int) -> bytes:
    return raw[:at] + struct.pack("<Q", value) + raw[at + 8 :]


def after(raw: bytes, name: bytes, more: int = 0) -> int:
    """Where what follows the name of a field begins."""
    return raw.index(name) + len(name) + more


GGUF: dict[str, Callable[[bytes], bytes]] = {
    **{name: lambda raw, content=content: content for name, content in RAW.items() if isinstance(content, bytes)},
    **{f"cut at {at}": lambda raw, at=at: raw[:at] for at in (3, 4, 8, 16, 24, 30, 100, 1000, -1, -3000)},
    **{f"{n} tensors": lambda raw, n=n: number(raw, 8, n) for n in (0, 1, 2**16, 2**40, 2**63, 2**64 - 1)},
    **{f"{n} fields": lambda raw, n=n: number(raw, 16, n) for n in (0, 1, 2**16, 2**40, 2**63, 2**64 - 1)},
    "a name of 2^60": lambda raw: number(raw, 24, 2**60),
    "a list of 2^60": lambda raw: number(raw, after(raw, b"tokenizer.ggml.token_type", 8), 2**60),
    "texts of 2^60": lambda raw: number(raw, after(raw, b"tokenizer.ggml.tokens", 8), 2**60),
    "texts of 2^30": lambda raw: number(raw, after(raw, b"tokenizer.ggml.tokens", 8), 2**30),
    "a type that is none": lambda raw: raw.replace(b"tokenizer.ggml.tokens\x09", b"tokenizer.ggml.tokens\x63"),
    "layers of a hundred million": lambda raw: number(raw, after(raw, b"llama.block_count", 4), 10**8 + (0 << 32)),
    "version 99": lambda raw: raw[:4] + b"\x63\0\0\0" + raw[8:],
    "an architecture that is none": lambda raw: raw.replace(b"llama", b"l\x1bama"),
    "no embedding": lambda raw: raw.replace(b"token_embd.weight", b"token_xmbd.weight"),
    "a shape of 2^50": lambda raw: number(raw, after(raw, b"token_embd.weight", 4), 2**50),
    "a shape of 0": lambda raw: number(raw, after(raw, b"token_embd.weight", 4), 0),
    "a type of weights that is none": lambda raw: number(raw, after(raw, b"token_embd.weight", 20), 999),
    "heads that are none": lambda raw: number(raw, after(raw, b"llama.attention.head_count", 4), 0),
}


@pytest.mark.parametrize("name", GGUF)
def test_a_damaged_gguf_file(name: str, gguf: bytes, tmp_path: Path, refuse: Callable[[Path], str]) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(GGUF[name](gguf))
    assert str(path) in refuse(path)


def test_a_good_gguf_file_in_the_hubs_cache(gguf: bytes, tmp_path: Path, refuse: Callable[[Path], str]) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "good.gguf").write_bytes(gguf)
    assert refuse(in_cache(tmp_path / "made") / "good.gguf") == ""


def test_the_whole_command_ends_with_exit_code_4(folder: Path, good: Path, tmp_path: Path, capfd: Any) -> None:
    change(folder, "config.json", num_hidden_layers=10**8)
    where = (str(folder / "config.json"), "'num_hidden_layers' is 100000000", "ERROR")
    assert_refused(capfd, where, "--device", "cpu", "--checkpoint", str(folder))
    put(folder / "config.json", HOSTILE.encode())
    assert collect("--device", "cpu", "--checkpoint", str(folder)) == pytest.ExitCode.USAGE_ERROR
    said = "".join(capfd.readouterr())
    assert "Traceback" not in said
    assert not controls(said)
    assert damaged.controls("\x1b")
    assert collect("--device", "cpu", "--checkpoint", str(good)) == 0
