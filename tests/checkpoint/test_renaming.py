"""Leaves whose names differ in the counters of layers only: which are paired, and which are refused."""

import numpy as np
import pytest

from jdist._src.checkpoint.checkpointer import Checkpointer
from jdist._src.checkpoint.renaming import pair_renamed

from laws import STRATEGIES


def keys(*paths):
    return [tuple(path.split(" ")) for path in paths]


def pairs(saved, wanted, kinds=None, **options):
    """The saved path for each wanted one; `kinds` are those of the saved and of the wanted leaves."""
    there, here = ({key: "" for key in keys(*paths)} for paths in (saved, wanted))
    if kinds is not None:
        there, here = (dict(zip(names, of, strict=True)) for names, of in zip((there, here), kinds, strict=True))
    found = pair_renamed(there, here, **options)
    return found if found is None else {" ".join(one): " ".join(other) for one, other in found.items()}


PAIRED = {
    "the_same": (["a dense_1/w", "n"], ["a dense_1/w", "n"]),
    "nested": (["p seq/dense/w", "p seq/dense_1/w"], ["p seq_2/dense_7/w", "p seq_2/dense_8/w"]),
    "past_ten": (["dense_8/w", "dense_9/w"], ["dense_10/w", "dense_11/w"]),
    "into_ten": (["dense/w", "dense_1/w"], ["dense_9/w", "dense_10/w"]),
    "numbers_of_lists": (["opt 0 mu d/w", "opt 1"], ["opt 0 mu d_4/w", "opt 1"]),
    "several_variables": (["d/w", "d/b"], ["d_1/w", "d_1/b"]),
}


@pytest.mark.parametrize("saved, wanted", PAIRED.values(), ids=PAIRED)
def test_names_that_differ_in_counters_are_paired_in_their_order(saved, wanted):
    assert pairs(saved, wanted) == dict(zip(wanted, saved, strict=True))


OTHER = {
    "another_name": (["dense/w"], ["conv/w"]),
    "one_more": (["dense/w"], ["dense_1/w", "dense_2/w"]),
    "another_depth": (["dense/w"], ["dense_1/w/x"]),
    "slash_in_a_key": (["dense w"], ["dense_1/w"]),
    "zero": (["x_0"], ["x_1"]),
    "number": (["x 1"], ["x 2"]),
}


@pytest.mark.parametrize("saved, wanted", OTHER.values(), ids=OTHER)
def test_names_that_differ_in_more_are_not_paired(saved, wanted):
    assert pairs(saved, wanted) is None


def test_names_on_both_sides_are_paired_only_where_their_kinds_leave_one_way():
    saved, wanted = ["d_1/w", "d_2/w"], ["d_2/w", "d_3/w"]
    shifted = {"d_2/w": "d_1/w", "d_3/w": "d_2/w"}
    assert pairs(saved, wanted, (["f32[3,4]", "f32[4]"], ["f32[3,4]", "f32[4]"])) == shifted
    with pytest.raises(ValueError, match=r"^d_1, d_2 in the checkpoint and d_2, d_3 in `like`$"):
        pairs(saved, wanted)
    assert pairs(saved, wanted, must_be_certain=False) == shifted
    with pytest.raises(ValueError, match="m/d, m/d_1 in the checkpoint and m/d_2, m/d_5"):
        pairs(["m d/w", "m d_1/w"], ["m d_2/w", "m d_5/w"])


def test_state_with_other_counters_is_restored_and_one_that_is_not_certain_is_refused(tmp_path):
    strategy = STRATEGIES["one_device"]()
    layers = lambda first: {f"dense_{first + i}/kernel": np.full(2, i, np.float32) for i in range(3)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, strategy.put(layers(8)))
        found = checkpointer.restore(strategy, layers(11)).state
        assert {name: leaf[0].item() for name, leaf in found.items()} == {f"dense_{11 + i}/kernel": i for i in range(3)}
        message = (
            r"step 1 in .* has layers with other names than `like`.* not certain: dense_8, dense_9, dense_10 in the "
            r"checkpoint and dense_9, dense_10, dense_11 in `like`\. Give the layers names .*`keras\.utils\.clear_session"
        )
        with pytest.raises(ValueError, match=message):
            checkpointer.restore(strategy, layers(9))
        with pytest.raises(ValueError, match=r"dense_11/kernel was float32\[2\] and is to be float32\[5\]"):
            checkpointer.restore(strategy, {**layers(11), "dense_11/kernel": np.zeros(5, np.float32)})
