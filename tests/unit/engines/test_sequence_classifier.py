"""A reward model of a few thousand random parameters: one number a text, whatever it is batched with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rpcrl.batch.data_proto import DataProto
from rpcrl.engines.sequence_classifier import SequenceClassifier
from rpcrl.errors import BatchError, UsageError
from rpcrl.roles.reward_model import RewardModelWorker
from rpcrl.testing.tiny_model import write_tiny_classifier, write_tiny_llama
from tests.unit.roles.local_group import local_groups

TEXTS = ["ascending 5 2 = 2 5", "7", "descending 1 2 3 4 5 6 = 9", "= = ="]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_classifier(tmp_path_factory.mktemp("judge"), seed=3)


def test_scores_are_those_of_transformers_whatever_the_micro_batch(folder: Path):
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        expected = [float(model(**tokenizer(text, return_tensors="pt")).logits[0, 0]) for text in TEXTS]
    judge = SequenceClassifier(folder)
    assert max(expected) - min(expected) > 0.05, "the texts differ"
    for size in (None, 1, 3):
        assert judge.score(TEXTS, micro_batch_size=size) == pytest.approx(expected, abs=1e-5)
    assert judge.score([]) == []


def test_chat_messages_go_through_the_models_own_template(folder: Path, tmp_path: Path):
    judge = SequenceClassifier(folder)
    messages = [{"role": "user", "content": "5 2 ="}]
    assert judge.text_of(messages, "2 5") == "5 2 =\n2 5"
    assert judge.text_of("5 2 =", " 2 5") == "5 2 = 2 5"
    with_template = write_tiny_classifier(tmp_path / "judge", seed=3)
    (with_template / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
    )
    assert SequenceClassifier(with_template).text_of(messages, "2 5") == "user 5 2 = assistant 2 5 "


def test_a_text_over_the_models_positions_is_refused_with_the_numbers(folder: Path):
    with pytest.raises(BatchError, match=r"at most 64 tokens .* text 1 of 2 has 70"):
        SequenceClassifier(folder).score(["1", " ".join(["1"] * 70)])


def test_models_that_give_no_single_number_are_refused(folder: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="has 1 label, whose logit is the score; this one has 2"):
        SequenceClassifier(write_tiny_llama(tmp_path / "causal"))
    headless = write_tiny_llama(tmp_path / "headless")
    config = headless / "config.json"
    config.write_text(config.read_text().replace("{", '{"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0},', 1))
    with pytest.raises(UsageError, match=r"the folder's weights lack score.weight"):
        SequenceClassifier(headless)


def test_the_role_scores_rows_and_names_what_it_misses(folder: Path):
    from rpcrl.config.reward import RewardModel

    config = RewardModel(enable=True, model_path=str(folder), micro_batch_size_per_gpu=2)
    with local_groups({"reward_model": (RewardModelWorker, (config,), {"device": "cpu", "threads": 1})}) as groups:
        worker = groups["reward_model"]
        prompts = [[{"role": "user", "content": "ascending 5 2 ="}], "7 ", "= "]
        batch = DataProto.from_dict(non_tensors={"raw_prompt": prompts, "response_text": ["2 5", "8", "1 2"]})
        scores = worker.compute_rm_score(batch).non_tensor_batch["rm_score"].tolist()
        texts = ["ascending 5 2 =\n2 5", "7 8", "= 1 2"]
        assert scores == pytest.approx(SequenceClassifier(folder).score(texts), abs=1e-5)
        with pytest.raises(BatchError, match="needs the non-tensor columns response_text"):
            worker.compute_rm_score(batch.select(non_tensor_batch_keys=["raw_prompt"]))
