"""Records what transformers makes of `cases`:

    python -m tests.model.drafts.assistant.record

in an environment of its own, with torch, safetensors and transformers 5.23 or later.
"""

import importlib
from typing import Any

from scripts.tools.models.assistants import KINDS, config_of, weights_of
from tests.model.drafts.assistant import cases


def main() -> None:
    """Writes the recording."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    # 5.23 refuses to build models of which every layer looks at another one's keys and values.
    text = transformers.Gemma4TextConfig
    text.kv_sharing_modes = property(lambda config: ["reuse"] * config.num_hidden_layers)
    found = {}
    for kind in KINDS:
        config = transformers.Gemma4AssistantConfig(**config_of(kind))
        model = transformers.Gemma4AssistantForCausalLM(config).eval()
        weights = {name: torch.from_numpy(array) for name, array in weights_of(config_of(kind)).items()}
        missing, unknown = model.load_state_dict(weights, strict=False)
        assert not unknown, unknown
        assert {name for name in missing if name != "lm_head.weight"} == set(), missing
        model.tie_weights()
        hidden = torch.from_numpy(cases.hidden())
        shared = {name: tuple(map(torch.from_numpy, pair)) for name, pair in cases.shared().items()}
        for step, row in enumerate(torch.from_numpy(cases.rows())):
            with torch.no_grad():
                out = model(
                    inputs_embeds=torch.cat([row, hidden])[None, None],
                    position_ids=torch.tensor([[cases.PLACES - 1]]),
                    shared_kv_states=shared,
                )
            hidden = out.last_hidden_state[0, 0]
            found[f"{kind}.{step}.logits"], found[f"{kind}.{step}.hidden"] = out.logits[0, 0], hidden
    importlib.import_module("safetensors.torch").save_file(found, cases.RECORDED)


if __name__ == "__main__":
    main()
