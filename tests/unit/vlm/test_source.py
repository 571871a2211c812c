"""The choice between mlx-lm and mlx-vlm, from a config alone. Neither is imported."""

import importlib.util
from collections.abc import Callable

import pytest

from runner.errors import ModelError
from runner.model.architectures import DECIDERS, OLLAMA_ONLY, Config, Family
from runner.model.module_config import text_config
from runner.vlm import NOT_INSTALLED
from runner.vlm.packages import BATCHED, COMPARED, DRAFTED, REFUSED
from runner.vlm.source import MlxVlm, VlmChoice, package_of

Install = Callable[[bool], None]
UNPROVEN = next(iter(REFUSED))
USUAL = VlmChoice()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lets mlx-vlm be installed, or not."""
    find = importlib.util.find_spec

    def set_to(there: bool) -> None:
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name: (find("json") if there else None) if name == "mlx_vlm" else find(name),
        )

    return set_to


def choose(config: Config, choice: VlmChoice = USUAL, architecture: str = "X") -> Family:
    return choice(architecture, config, from_store=False)


def test_a_model_that_mlx_lm_has_is_served_by_it(install: Install) -> None:
    for there in (True, False):
        install(there)
        assert choose({"model_type": "qwen3"}).import_name == "mlx_lm.models.qwen3"
        ours = choose({"model_type": "kolibri1"}, architecture="Kolibri1ForCausalLM")
        assert ours.import_name == "mlx_lm.models.kolibri1", "mlx-vlm has it too"


def test_one_that_it_lacks_is_mlx_vlms_where_that_is_installed(install: Install) -> None:
    install(True)
    family = choose({"model_type": "idefics3", "text_config": {}})
    assert (family.import_name, family.text) == ("mlx_vlm.models.idefics3", "text_config")
    assert choose({"model_type": "k2_horizon"}).text == ""
    assert choose({"model_type": "cohere2_vision"}).module == "aya_vision"
    install(False)
    with pytest.raises(ModelError, match=r"X, which mlx-vlm has: mlx-vlm is not installed: pip install .*vlm\.lock$"):
        choose({"model_type": "idefics3"})


def test_a_model_that_sees_with_mlx_vlm_alone_is_its_own_where_pictures_are_wanted(install: Install) -> None:
    config: Config = {"model_type": "qwen3_vl", "text_config": {}, "vision_config": {}}
    for there, media, library, unseen in (
        (True, True, "mlx_vlm", ""),
        (True, False, "mlx_lm", ""),
        (False, True, "mlx_lm", NOT_INSTALLED),
    ):
        install(there)
        found = choose(config, VlmChoice(media=media))
        assert (found.import_name.split(".")[0], found.unseen) == (library, unseen)
        lfm2 = choose({**config, "model_type": "lfm2_vl"}, VlmChoice(media=media), "Lfm2VlForConditionalGeneration")
        assert lfm2.import_name == ("mlx_vlm.models.lfm2_vl" if library == "mlx_vlm" else "mlx_lm.models.lfm2")
    install(True)
    assert choose({"model_type": "qwen3_vl", "text_config": {}}, VlmChoice(media=True)).library is None, "no tower"
    assert choose({**config, "model_type": "qwen3_5"}, VlmChoice(media=True)).library is None, "we have its tower"


def test_the_parts_of_an_omni_model_are_within_its_thinker(install: Install) -> None:
    install(True)
    config: Config = {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": {}, "vision_config": {}}}
    assert choose(config).text == "thinker_config.text_config"
    assert text_config({"thinker_config": {"text_config": {"a": 1}}}, choose(config)) == {"a": 1}
    with pytest.raises(ModelError, match=r"thinker_config\.text_config must be an object"):
        text_config({"thinker_config": {}}, choose(config))
    assert not USUAL.blindness(config)
    assert USUAL.blindness({**config, "thinker_config": {}}) == "a text model"


def test_a_model_whose_config_leaves_the_tower_to_its_class_sees() -> None:
    assert not USUAL.blindness({"model_type": "llava_qwen2"})
    assert USUAL.blindness({"model_type": "idefics3"}) == "a text model"


def test_what_was_not_compared_is_refused_with_the_reason_unless_it_is_asked_for(install: Install) -> None:
    install(True)
    with pytest.raises(ModelError, match=f"{REFUSED[UNPROVEN]}; --unproven-models serves it all the same$"):
        choose({"model_type": UNPROVEN})
    assert choose({"model_type": UNPROVEN}, VlmChoice(unproven=True)).module == UNPROVEN


def test_d1_is_served_as_lfm2_vl_and_d1_omni_is_refused(install: Install) -> None:
    """d1 decides by its next token, as any model that writes text may."""
    install(True)
    named = {"auto_map": {"AutoModel": "modeling_d1.D1Model"}, "text_config": {}, "vision_config": {}}
    assert choose({"model_type": "lfm2_vl", **named}, architecture="D1Model").import_name == "mlx_vlm.models.lfm2_vl"
    with pytest.raises(
        ModelError, match=r"^unsupported architecture: D1OmniModel, .* it decides with its own output head"
    ):
        choose({"model_type": "d1_omni"}, architecture="D1OmniModel")


@pytest.mark.parametrize("model_type", ["unheard_of", "..", "os.path", None, 5])
def test_any_other_type_is_refused_as_before(model_type: object, install: Install) -> None:
    install(True)
    with pytest.raises(ModelError, match=r"^unsupported architecture: X$"):
        choose({"model_type": model_type}, VlmChoice(unproven=True))
    assert package_of({"model_type": model_type}) == ""


@pytest.mark.parametrize("architecture", sorted(OLLAMA_ONLY.keys() - DECIDERS.keys()))
def test_what_remains_with_ollama_is_not_taken_for_another_model(architecture: str, install: Install) -> None:
    install(True)
    with pytest.raises(ModelError, match="only Ollama's own runner serves it"):
        choose({"model_type": "idefics3"}, VlmChoice(unproven=True), architecture)


def test_one_of_ollamas_own_is_served_by_mlx_vlm(install: Install) -> None:
    install(True)
    (name,) = (name for name in OLLAMA_ONLY if "Qwen4Exp" in name)
    assert choose({"model_type": "qwen4_exp"}, architecture=name).import_name == "mlx_vlm.models.qwen4_exp"


@pytest.mark.parametrize("architecture", DECIDERS)
def test_one_that_decides_is_mlx_vlms_if_that_is_installed(architecture: str, install: Install) -> None:
    install(True)
    assert choose({"model_type": "qwen3_5"}, architecture=architecture).decides
    install(False)
    with pytest.raises(ModelError, match="mlx-vlm is not installed"):
        choose({"model_type": "qwen3_5"}, architecture=architecture)


def test_the_table_agrees_with_itself() -> None:
    assert BATCHED <= COMPARED
    assert DRAFTED <= COMPARED
    assert not COMPARED & REFUSED.keys()
    assert all(why and not why.endswith(".") for why in REFUSED.values())


def test_only_what_a_trial_has_shown_may_share_a_forward_or_be_drafted() -> None:
    alone = next(iter(COMPARED - BATCHED))
    why_not = MlxVlm().why_not
    assert why_not(alone, batches=True) == f"mlx_vlm.models.{alone} did not give the same answers in a trial"
    assert why_not(next(iter(BATCHED)), batches=True) == why_not(next(iter(DRAFTED)), batches=False) == ""
