"""Gets the log-probabilities of a text from a rollout engine, which runs the checkpoint with other kernels.

An adapter is a function of three arguments: a checkpoint's folder, the tokens int64 [batch, length] on the CPU, and the
dtype of the weights ("bfloat16"). It returns the log-probability of every token but the first, [batch, length - 1], at
temperature 1 over the whole vocabulary. It runs in a separate process.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

from convergence.arms import isolate
from convergence.files import Unusable
from convergence.models.folder import guarded
from convergence.named import load

Adapter = Callable[[str, torch.Tensor, str], torch.Tensor]


def vllm(path: str, ids: torch.Tensor, dtype: str) -> torch.Tensor:
    """vLLM's adapter: ``prompt_logprobs`` of requests that generate one token."""
    from vllm import LLM, SamplingParams

    engine = LLM(model=path, dtype=dtype, max_model_len=ids.shape[1] + 1, enable_prefix_caching=False)
    asked = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)  # 0: no alternative tokens
    found = engine.generate([{"prompt_token_ids": row} for row in ids.tolist()], asked)
    return _of_tokens(ids, [[_numbers(place) for place in row.prompt_logprobs] for row in found])


def _numbers(place: Any) -> dict[int, Any]:
    return {token: entry.logprob for token, entry in (place or {}).items()}


def sglang(path: str, ids: torch.Tensor, dtype: str) -> torch.Tensor:
    """SGLang's adapter: ``input_token_logprobs`` of requests that generate one token."""
    import sglang

    engine = sglang.Engine(model_path=path, dtype=dtype, skip_tokenizer_init=True, disable_radix_cache=True)
    asked = {"max_new_tokens": 1, "temperature": 1.0}
    try:
        found = engine.generate(input_ids=ids.tolist(), sampling_params=asked, return_logprob=True, logprob_start_len=0)
    finally:
        engine.shutdown()
    rows = [row["meta_info"]["input_token_logprobs"] for row in found]
    return _of_tokens(ids, [[{token: number} for number, token, *_ in row] for row in rows])


ENGINES: dict[str, Adapter] = {"vllm": vllm, "sglang": sglang}


def _of_tokens(ids: torch.Tensor, rows: Sequence[Sequence[dict[int, Any]]]) -> torch.Tensor:
    """The log-probabilities [batch, length - 1] of the tokens ``ids``. ``rows`` has the engine's scores of tokens at
    each position; the first position has no scores.

    Raises:
        ValueError: the engine did not score a token.
    """
    result = []
    for tokens, places in zip(ids.tolist(), rows, strict=True):
        if len(places) != len(tokens):
            raise ValueError(f"it scored {len(places)} tokens of {len(tokens)}")
        for number, (token, place) in enumerate(zip(tokens[1:], places[1:], strict=True), start=2):
            if place.get(token) is None:
                raise ValueError(f"it did not score token {token}, number {number} of a row")
        result.append([float(place[token]) for token, place in zip(tokens[1:], places[1:], strict=True)])
    return torch.tensor(result, dtype=torch.float32)


def check_engine(name: str) -> None:
    """Check that ``name`` is an installed engine or has the form ``module:function``.

    Raises:
        Unusable: ``name`` is neither.
    """
    if name in ENGINES:
        if importlib.util.find_spec(name) is None:
            raise Unusable(f"--rollout {name}: the package is not installed here")
    elif not all(part.strip() for part in name.partition(":")):
        allowed = f"{', '.join(ENGINES)} and the name of an adapter, package.module:function"
        raise Unusable(f"--rollout {name!r} is unknown; allowed are {allowed}")


def log_probs(name: str, path: str, ids: torch.Tensor, dtype: str, timeout: float = isolate.TIMEOUT) -> torch.Tensor:
    """The log-probabilities float32 [batch, length - 1] that the engine ``name`` gives to the tokens ``ids``.

    Raises:
        Unusable: the engine failed, or returned no log-probabilities. The message gives the reason.
    """
    with guarded(f"--rollout {name}", "gives no log-probabilities of the text"):
        found = isolate.call(_called, name, path, ids.cpu(), dtype, timeout=timeout)
        if not isinstance(found, torch.Tensor) or found.shape != ids[:, 1:].shape:
            what = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ValueError(f"it returned {what}; allowed is a tensor {list(ids[:, 1:].shape)}")
        if not bool(torch.isfinite(found).all()):
            raise ValueError(f"{int((~torch.isfinite(found)).sum())} of its {found.numel()} numbers are not finite")
    return found.float()


def _called(name: str, path: str, ids: torch.Tensor, dtype: str) -> Any:
    adapter = ENGINES.get(name) or load(name, "--rollout", "with a folder, tokens and a dtype")
    return adapter(path, ids, dtype)
