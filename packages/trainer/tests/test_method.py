from typing import NamedTuple

import torch
from posttrain_collators import FeedbackCollator, Padding, PreferenceCollator, TokenCollator
from posttrain_trainer import Anchor
from posttrain_trainer.method import positions, token_count

PAIR = {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]}


class Plain:
    pass


class Counting:
    def tokens(self, batch):
        return 42


class Other(NamedTuple):
    ids: torch.Tensor
    weights: torch.Tensor


def test_tokens_of_a_batch():
    batch = TokenCollator(Padding(0))([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}])
    assert token_count(Plain(), batch) == 4
    assert token_count(Counting(), batch) == 42
    assert token_count(Plain(), Other(torch.ones(2, 2), torch.ones(2))) is None


def test_a_prompt_counts_once_with_all_its_completions():
    collate = PreferenceCollator(Padding(0, multiple_of=4))
    assert token_count(Plain(), collate([PAIR, PAIR], size=2)) == 12
    assert token_count(Plain(), collate([PAIR], size=3)) == 6  # what fills the batch up is no token
    assert token_count(Plain(), collate([], size=3)) == 0
    assert token_count(Plain(), PreferenceCollator(0)([{"chosen_ids": [1, 2], "rejected_ids": [3]}])) == 3
    assert token_count(Plain(), FeedbackCollator(0)([{"completion_ids": [1, 2], "label": True}])) == 2


def test_positions_of_a_batch():
    logps = {"chosen_reference_logps": [-1.0, -1.0], "rejected_reference_logps": [-1.0]}
    batch = PreferenceCollator(Padding(0, multiple_of=4))([{**PAIR, **logps, "margin": 1.0}], size=2)
    assert positions(batch) == 2 * 4 + 2 * 2 * 4
    assert positions(Anchor(batch)) == 0
    tokens = TokenCollator(Padding(0))([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}])
    assert positions(tokens) == 6
