"""What mlx-vlm's packages may do here, as comparisons with it found. Written by `python -m tests.vlm.record`."""

COMPARED = frozenset(
    """
    aya_vision cohere_compass deepseek_vl_v2 deepseekocr deepseekocr_2 dots_ocr fastvlm flint gemma3 glm4v glm4v_moe
    glm_ocr granite4_vision granite_vision hrm_text hy_v4 idefics2 idefics3 internvl internvl_chat jina_vlm k2_horizon
    kimi_k25 kimi_k3 kimi_vl kolibri1 lfm2_vl llama4 llava llava_bunny llava_next llava_onevision llmjpvl locateanything
    longcat_flash_sparse mage_vl mimo_v2 minicpmo minicpmv4_6 minimax_m3 minimax_m3_vl mistral3 mistral_large3 molmo2
    paddleocr_vl phi4_siglip pixtral plamo2vl qwen2_5_vl qwen2_vl qwen3_omni_moe qwen3_vl qwen3_vl_moe qwen4_exp smolvlm
    step3p7 xing4_0 z1t zaya1_vl
    """.split()  # noqa: SIM905  a name a line would fill pages
)
"""The packages whose texts were compared with mlx-vlm's own computation, and are equal."""

BATCHED = frozenset(
    """
    aya_vision cohere_compass deepseek_vl_v2 deepseekocr deepseekocr_2 dots_ocr fastvlm flint gemma3 glm4v glm4v_moe
    glm_ocr granite4_vision granite_vision hrm_text idefics2 idefics3 internvl internvl_chat k2_horizon kimi_k25 kimi_vl
    kolibri1 llava llava_bunny llava_next llava_onevision llmjpvl locateanything longcat_flash_sparse mage_vl mimo_v2
    minicpmo minimax_m3 mistral3 mistral_large3 molmo2 paddleocr_vl phi4_siglip pixtral qwen2_5_vl qwen2_vl
    qwen3_omni_moe qwen3_vl qwen3_vl_moe smolvlm step3p7 xing4_0
    """.split()  # noqa: SIM905  a name a line would fill pages
)
"""The packages whose answers may share a forward."""

DRAFTED = frozenset(
    """
    aya_vision cohere_compass deepseek_vl_v2 deepseekocr deepseekocr_2 dots_ocr fastvlm flint gemma3 glm4v glm4v_moe
    glm_ocr granite4_vision granite_vision hrm_text idefics2 idefics3 internvl internvl_chat jina_vlm k2_horizon
    kimi_k25 kimi_vl kolibri1 llava llava_bunny llava_next llava_onevision llmjpvl locateanything longcat_flash_sparse
    mage_vl mimo_v2 minicpmo minimax_m3 mistral3 mistral_large3 molmo2 paddleocr_vl phi4_siglip pixtral qwen2_5_vl
    qwen2_vl qwen3_omni_moe qwen3_vl qwen3_vl_moe smolvlm step3p7 xing4_0
    """.split()  # noqa: SIM905  a name a line would fill pages
)
"""The packages whose answers may be drafted."""

ALONE = frozenset(
    """
    deepseekocr deepseekocr_2 fastvlm jina_vlm llava_bunny minicpmv4_6 paddleocr_vl step3p7 zaya1_vl
    """.split()  # noqa: SIM905  a name a line would fill pages
)
"""Those of SEEING that take one picture a prompt."""

SEEING = frozenset(
    """
    aya_vision cohere_compass deepseek_vl_v2 deepseekocr deepseekocr_2 dots_ocr fastvlm gemma3 glm4v glm4v_moe glm_ocr
    idefics2 idefics3 internvl internvl_chat jina_vlm kimi_k25 kimi_k3 kimi_vl lfm2_vl llava llava_bunny llava_onevision
    locateanything mage_vl mimo_v2 minicpmo minicpmv4_6 minimax_m3_vl mistral3 molmo2 paddleocr_vl pixtral qwen2_5_vl
    qwen2_vl qwen3_omni_moe qwen3_vl qwen3_vl_moe qwen4_exp smolvlm step3p7 zaya1_vl
    """.split()  # noqa: SIM905  a name a line would fill pages
)
"""The packages whose pictures were compared with mlx-vlm's own computation, and give equal answers."""

BLIND: dict[str, str] = {
    "granite4_vision": "its answers about pictures are not mlx-vlm's own",
    "granite_vision": "its answers about pictures are not mlx-vlm's own",
    "llama4": "its answers about pictures are not mlx-vlm's own",
    "llava_next": "its answers about pictures are not mlx-vlm's own",
    "llmjpvl": "its answers about pictures are not mlx-vlm's own",
    "phi4_siglip": "its answers about pictures are not mlx-vlm's own",
    "plamo2vl": "it was not compared with it yet",
}
"""Package that is served -> what keeps its pictures from being served."""

REFUSED: dict[str, str] = {
    "deepseek_v4": "its answers depend on where prompts are cut",
    "ernie4_5_moe_vl": "it does not give mlx-vlm's own answers",
    "falcon_ocr": "it was not compared with it yet",
    "florence2": "it was not compared with it yet",
    "gemma3n": "it was not compared with it yet",
    "glm5_next": "it was not compared with it yet",
    "got": "it was not compared with it yet",
    "hunyuan_vl": "its answers depend on where prompts are cut",
    "inkling": "mlx-vlm cannot be used here: No module named 'mlx_audio'",
    "limite": "its answers depend on where prompts are cut",
    "minicpmv4_7": "it does not give mlx-vlm's own answers",
    "mllama": "its answers depend on where prompts are cut",
    "molmo": "it was not compared with it yet",
    "molmo_point": "it was not compared with it yet",
    "moondream2": "it was not compared with it yet",
    "moondream3": "it was not compared with it yet",
    "multi_modality": "mlx-vlm cannot be used here: No module named 'cv2'",
    "nemotron_parse": "it was not compared with it yet",
    "paligemma": "its answers depend on where prompts are cut",
    "phi3_v": "it was not compared with it yet",
    "phi4mm": "it was not compared with it yet",
    "unlimited_ocr": "its answers depend on where prompts are cut",
    "youtu_vl": "it was not compared with it yet",
}
"""Package -> what keeps it from being served."""
