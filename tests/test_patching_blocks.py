"""``with patched(model)``: blocks of one model, or of parts of it, that overlap in whatever order."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
from contextlib import ExitStack

import pytest
import torch
from torch import nn

import liger_kernels
from liger_kernels.patching.swap import recipe_of
from tests.patching_checks import DEVICE, EVERYTHING, VOCAB, batch, tiny


def patched_paths(model: nn.Module) -> set[str]:
    return {path for path, module in model.named_modules() if recipe_of(module) is not None}


@pytest.fixture
def model():
    return tiny("llama")


@pytest.fixture
def everything():
    """The paths of all that a patch of the model replaces."""
    model = tiny("llama")
    liger_kernels.patch(model)
    return patched_paths(model)


def state(model: nn.Module) -> list[tuple[type, list[str]]]:
    return [(type(module), sorted(vars(module))) for module in model.modules()]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_blocks_that_end_in_any_order(model, everything, order):
    before = state(model)
    blocks = [ExitStack() for _ in order]
    reports = [block.enter_context(liger_kernels.patched(model)) for block in blocks]
    assert all(report is reports[0] for report in reports)
    for number, block in enumerate(order):
        assert patched_paths(model) == everything
        assert liger_kernels.status(model).counts() == EVERYTHING["llama"]
        blocks[block].close()
        assert bool(patched_paths(model)) == (number < len(order) - 1)
    assert state(model) == before
    assert liger_kernels.status(model) is None


def test_generators_and_an_error(model):
    def steps():
        with liger_kernels.patched(model):
            yield
            yield

    first, second = steps(), steps()
    next(first), next(second)
    with pytest.raises(ZeroDivisionError):
        first.throw(ZeroDivisionError)
    assert patched_paths(model)
    second.close()
    assert not patched_paths(model)


def test_threads(model, everything):
    """Every thread has all patched in its block, whoever comes and goes, and nothing is left."""
    errors, start = [], threading.Barrier(4)

    def run():
        start.wait()
        for _ in range(3):
            with liger_kernels.patched(model):
                if patched_paths(model) != everything:
                    errors.append(patched_paths(model))
                if any(recipe_of(module.__class__.__mro__[1]) for module in model.modules()):
                    errors.append("a patched class of a patched class")

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not patched_paths(model)


@pytest.mark.parametrize("part_first", [True, False])
def test_blocks_of_a_model_and_of_a_part_of_it(model, everything, part_first):
    """Each module is held by the blocks that were asked for it."""
    inner = {path for path in everything if path.startswith("model.layers.0.")}
    part, whole = ExitStack(), ExitStack()
    for block, of in ((part, model.model.layers[0]), (whole, model))[:: 1 if part_first else -1]:
        block.enter_context(liger_kernels.patched(of))
    assert patched_paths(model) == everything
    whole.close()
    assert patched_paths(model) == inner
    part.close()
    assert not patched_paths(model)


def test_what_was_patched_before_stays(model, everything):
    liger_kernels.patch(model.model.layers[0])
    before = patched_paths(model)
    for _ in range(2):
        with liger_kernels.patched(model), liger_kernels.patched(model.model):
            assert patched_paths(model) == everything
        assert patched_paths(model) == before
    liger_kernels.patch(model)
    with liger_kernels.patched(model):
        pass
    assert patched_paths(model) == everything


def test_an_unpatch_inside_ends_all_blocks(model, everything):
    with liger_kernels.patched(model), liger_kernels.patched(model):
        liger_kernels.unpatch(model)
        assert not patched_paths(model)
    with liger_kernels.patched(model):
        liger_kernels.unpatch(model)
        later = ExitStack()
        later.enter_context(liger_kernels.patched(model))
    assert patched_paths(model) == everything  # by a block that began after the other was ended
    later.close()
    assert not patched_paths(model)
    with liger_kernels.patched(model):
        liger_kernels.unpatch(model)
        liger_kernels.patch(model)
    assert patched_paths(model) == everything


@pytest.mark.parametrize("how", ["assigned", "resized", "set"])
def test_a_head_that_comes_in_a_block_goes_with_it(model, how):
    before = {type(module) for module in model.modules()}
    with liger_kernels.patched(model), liger_kernels.patched(model):
        head = nn.Linear(32, VOCAB, bias=False, device=DEVICE)
        if how == "assigned":
            model.lm_head = head
            liger_kernels.patch(model)
        elif how == "resized":
            model.resize_token_embeddings(VOCAB + 3)
        else:
            model.set_output_embeddings(head)
        assert liger_kernels.status(model).fuses_head
    assert {type(module) for module in model.modules()} == before
    assert liger_kernels.status(model) is None


@pytest.mark.parametrize(
    "through", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_that_was_made_in_a_block_is_patched_for_good(model, everything, through):
    with liger_kernels.patched(model):
        twin = through(model)
        with liger_kernels.patched(twin):
            pass
    assert not patched_paths(model)
    assert patched_paths(twin) == everything
    with liger_kernels.patched(twin):
        pass
    assert patched_paths(twin) == everything
    liger_kernels.unpatch(twin)
    assert state(twin) == state(tiny("llama"))


def test_other_options_than_those_of_an_open_block(model):
    with liger_kernels.patched(model):
        with (
            pytest.raises(ValueError, match="already patched with memory=None, not 'small'"),
            liger_kernels.patched(model, memory="small"),
        ):
            pass
        assert liger_kernels.status(model).fuses_head
    assert not patched_paths(model)
    with pytest.raises(TypeError, match=r"model is a str"), liger_kernels.patched("model"):
        pass


@pytest.mark.filterwarnings("ignore:liger_kernels.patch")
def test_blocks_that_replace_nothing():
    model = nn.Sequential(nn.Linear(3, 3))
    with liger_kernels.patched(model) as outer:
        with liger_kernels.patched(model):
            pass
        assert liger_kernels.status(model) is outer
    assert liger_kernels.status(model) is None
    assert "_liger_kernels" not in " ".join(vars(model))


def test_the_second_block_computes_with_kernels_when_the_first_has_ended(model):
    expected = model(**batch()).loss
    first, second = ExitStack(), ExitStack()
    first.enter_context(liger_kernels.patched(model))
    report = second.enter_context(liger_kernels.patched(model))
    first.close()
    loss = model(**batch()).loss
    assert report.forwards == 1
    torch.testing.assert_close(loss, expected)
    second.close()
    assert torch.equal(model(**batch()).loss, expected)
