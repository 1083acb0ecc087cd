"""Fixtures: small folders of data and models, as somebody has them. conftest.py has them for all
tests."""

import shutil
from itertools import product

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image


@pytest.fixture(scope="session")
def review_folder(tmp_path_factory):
    """120 reviews to train with and 30 to be judged by, which a small model tells apart."""
    folder = tmp_path_factory.mktemp("reviews")
    said = ["a bore", "cold and flat", "a pain to see", "no fun", "the worst of its kind"]
    said = said, ["a delight", "warm and funny", "a joy to see", "great fun", "the best of all"]
    lines = [
        f"{label}\t{2 * label - 1.5}\t{said[label][i % 5]}, scene {i} of {i % 7}"
        for i, label in product(range(75), (0, 1))
    ]
    for name, part in {"train": lines[:120], "test": lines[120:]}.items():
        (folder / f"{name}.tsv").write_text("\n".join(["label\trating\ttext", *part, ""]))
    return folder


@pytest.fixture(scope="session")
def pretrained(review_folder, tmp_path_factory):
    """A folder as `save_pretrained` leaves it: tiny, and of another kind than ours."""
    transformers = pytest.importorskip("transformers")
    from jobs import reviews

    path = tmp_path_factory.mktemp("pretrained")
    reviews.train_tokenizer(review_folder).save_pretrained(path)
    torch.manual_seed(1)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        vocab_size=reviews.VOCABULARY, max_position_embeddings=20,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def chat(tmp_path_factory):
    """Conversations, some with a mistake, and in hub/ a Llama with a chat template for them."""
    transformers = pytest.importorskip("transformers")
    from libraries import hub

    root = shutil.copytree(ROOT / "tests/chat", tmp_path_factory.mktemp("all") / "chat")
    tokenizer = hub.train_tokenizer(["to be or not to be that is the question"], 280)
    names = ["<|user|>", "<|assistant|>"]
    tokenizer.add_special_tokens({"eos_token": "<|end|>", "additional_special_tokens": names})
    tokenizer.save_pretrained(root / "bare")
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=300, num_hidden_layers=2, **shape)
    transformers.LlamaForCausalLM(config).save_pretrained(root / "bare")
    shutil.copytree(root / "bare", root / "hub")
    shutil.copy(root / "chat_template.jinja", root / "hub")
    return root


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    """A tiny ImageFolder: three colours, with some noise, in files of several kinds and sizes."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    sizes = [(32, 32), (40, 32), (32, 48), (64, 64)]
    colours = {"blue": (60, 90, 200), "green": (70, 180, 80), "red": (210, 70, 60)}
    for (split, count), (name, colour) in product([("train", 20), ("test", 7)], colours.items()):
        (root / split / name).mkdir(parents=True)
        for i in range(count):
            height, width = sizes[i % 4]
            pixels = rng.normal(colour, 25, size=(height, width, 3)).clip(0, 255)
            image = Image.fromarray(pixels.astype(np.uint8))
            kind, mode = ("png", "P") if i % 5 == 4 else ("jpg", "RGB")
            image.convert(mode).save(root / split / name / f"{i:03}.{kind}")
    return root
