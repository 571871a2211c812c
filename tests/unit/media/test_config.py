"""The fields of config.json and preprocessor_config.json that families read, and those that they refuse."""

import re
from collections.abc import Mapping

import pytest

from runner.errors import ModelError
from runner.media.families import (
    Around,
    Gemma4,
    Gemma4Sound,
    Gemma4Unified,
    Gemma4UnifiedSound,
    Glimmer,
    NemotronH,
    PictureFamily,
    Qwen35,
)

Config = Mapping[str, object]
CLASSES: tuple[type[PictureFamily], ...] = (Qwen35, Glimmer, Gemma4, Gemma4Unified, NemotronH)


@pytest.mark.parametrize("family", CLASSES)
def test_an_empty_config_stands_for_the_defaults(family: type[PictureFamily]) -> None:
    assert family.from_config({"vision_config": {}}, {}) == family()
    assert family.from_config({"vision_config": None}, {}) == family()


@pytest.mark.parametrize(
    ("config", "preprocessor", "expected"),
    [
        ({"vision_config": {"patch_size": 14, "spatial_merge_size": 4}}, {"patch_size": 9}, Qwen35(14, 4)),
        ({"vision_patch_size": 12, "vision_downsample_factor": 4}, {}, Glimmer(12, 4)),
        ({"vision_soft_tokens_per_image": 560, "vision_config": {"default_output_length": 70}}, {}, Gemma4(budget=560)),
        ({"vision_config": {"default_output_length": 140}}, {"max_soft_tokens": 70}, Gemma4(budget=140)),
        ({}, {"max_soft_tokens": 70}, Gemma4(budget=70)),
        ({"text_config": {"use_bidirectional_attention": "vision"}}, {}, Gemma4(bidirectional=True)),
        ({"use_bidirectional_attention": "vision"}, {}, Gemma4(bidirectional=True)),
        ({"text_config": {"use_bidirectional_attention": "all"}}, {}, Gemma4(bidirectional=False)),
        ({"vision_config": {"args": {"min_num_patches": 4, "max_num_patches": 64}}}, {}, NemotronH(16, 2, 4, 64)),
        ({"vision_config": {"max_num_patches": 2000}}, {"max_num_patches": 3000}, NemotronH(16, 2, 1024, 3000)),
        ({"downsample_ratio": 0.5}, {"max_model_len": 504}, NemotronH(16, 2, 1024, 2000)),
        ({}, {"max_model_len": 4}, NemotronH(16, 2, 1024, 1024)),
    ],
)
def test_a_family_reads_its_fields_of_both_configs(
    config: Config, preprocessor: Config, expected: PictureFamily
) -> None:
    assert type(expected).from_config(config, preprocessor) == expected


@pytest.mark.parametrize(
    ("family", "config", "text"),
    [
        (Qwen35, {"vision_config": []}, "config.json: vision_config: want an object, found list"),
        (Qwen35, {"vision_config": {"patch_size": -1}}, "config.json: patch_size: want a positive integer, found -1"),
        (Qwen35, {"vision_config": {"patch_size": 16.0}}, "patch_size: want a positive integer, found 16.0"),
        (Qwen35, {"vision_config": {"spatial_merge_size": 1 << 60}}, "spatial_merge_size: want a positive integer"),
        (Gemma4, {"vision_soft_tokens_per_image": 281}, "want one of (70, 140, 280, 560, 1120), found 281"),
        (Gemma4Unified, {"vision_config": {"model_patch_size": 47}}, "model_patch_size: want 48, found 47"),
        (NemotronH, {"vision_config": {"args": 3}}, "config.json: args: want an object, found int"),
    ],
)
def test_a_wrong_field_of_a_config_is_refused_by_name(family: type[PictureFamily], config: Config, text: str) -> None:
    with pytest.raises(ModelError, match=re.escape(text)):
        family.from_config(config, {})


QWEN = {"vision_start_token_id": 7, "image_token_id": 8, "vision_end_token_id": 0}
GEMMA = {"boi_token_id": 1, "image_token_id": 2, "eoi_token_id": 3}


@pytest.mark.parametrize(
    ("family", "config", "expected"),
    [
        (Qwen35, QWEN, Around(7, 8, 0)),
        (Gemma4, GEMMA, Around(1, 2, 3)),
        (Glimmer, {"image_token_id": 5}, Around("<|image_start|>", 5, "<|image_end|>")),
        (Glimmer, {"patch_token_id": 6}, Around("<|image_start|>", 6, "<|image_end|>")),
        (NemotronH, {"img_context_token_id": 9}, Around("<img>", 9, "</img>")),
        (NemotronH, {"image_token_id": 9, "img_start_token": "<a>"}, Around("<a>", 9, "</img>")),
        (NemotronH, {"img_context_token_id": 0, "img_context_token": "<x>"}, Around("<img>", "<x>", "</img>")),
    ],
)
def test_the_tokens_around_a_picture(family: type[PictureFamily], config: Config, expected: Around) -> None:
    assert family.around(config) == expected


@pytest.mark.parametrize(
    ("family", "config", "text"),
    [
        *((Qwen35, {**QWEN, name: None}, f"config.json: {name}: missing") for name in QWEN),
        *((Gemma4, {**GEMMA, name: None}, f"config.json: {name}: missing") for name in GEMMA),
        (Glimmer, {}, "config.json: image_token_id or patch_token_id: missing"),
        (Qwen35, {**QWEN, "image_token_id": -1}, "config.json: image_token_id: want the id of a token, found -1"),
        (Gemma4, {**GEMMA, "eoi_token_id": True}, "config.json: eoi_token_id: want the id of a token, found True"),
        (NemotronH, {"img_start_token": 4}, "config.json: img_start_token: want a text, found 4"),
    ],
)
def test_missing_and_senseless_tokens_are_refused(family: type[PictureFamily], config: Config, text: str) -> None:
    with pytest.raises(ModelError, match=f"^{re.escape(text)}$"):
        family.around(config)


# --- sounds


def test_the_samples_of_a_row_are_read() -> None:
    assert Gemma4UnifiedSound.from_config({}) == Gemma4UnifiedSound(640)
    assert Gemma4UnifiedSound.from_config({"audio_config": {"audio_samples_per_token": 320}}) == Gemma4UnifiedSound(320)
    for senseless in (-1, 16_001, 2.5, "640", True):
        with pytest.raises(ModelError, match=rf"^invalid audio_samples_per_token {senseless}$"):
            Gemma4UnifiedSound.from_config({"audio_config": {"audio_samples_per_token": senseless}})
    assert Gemma4Sound.from_config({"audio_config": {"audio_samples_per_token": 320}}) == Gemma4Sound()


def test_the_tokens_around_a_sound() -> None:
    config = {"boa_token_id": 7, "audio_token_id": 8, "eoa_token_index": 9}
    assert Gemma4Sound.around(config) == Around(7, 8, 9)
    assert Gemma4Sound.around(config | {"eoa_token_id": 10}) == Around(7, 8, 10)
    for key in config:
        with pytest.raises(ModelError, match=f"config.json: .*{key}"):
            Gemma4UnifiedSound.around({other: value for other, value in config.items() if other != key})
