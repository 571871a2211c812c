"""The packages of mlx-vlm, by the results of comparisons with mlx-vlm. Written by `python -m tests.vlm.record`."""

COMPARED = frozenset(
    """
    aya_vision cohere_compass deepseek_vl_v2 deepseekocr deepseekocr_2 dots_ocr ernie4_5_moe_vl falcon_ocr fastvlm flint
    gemma3 glm4v glm4v_moe glm5_next glm_ocr granite4_vision granite_vision hrm_text hy_v4 idefics2 idefics3 internvl
    internvl_chat jina_vlm k2_horizon kimi_k25 kimi_k3 kimi_vl lfm2_vl limite llama4 llava llava_bunny llava_next
    llava_onevision llmjpvl locateanything longcat_flash_sparse mage_vl mimo_v2 minicpmo minicpmv4_6 minicpmv4_7
    minimax_m3 minimax_m3_vl mistral3 mistral_large3 molmo2 paddleocr_vl phi3_v phi4_siglip pixtral plamo2vl qwen2_5_vl
    qwen2_vl qwen3_omni_moe qwen3_vl qwen3_vl_moe qwen4_exp smolvlm step3p7 xing4_0 youtu_vl z1t zaya1_vl
    """.split()  # noqa: SIM905  a name a line would fill pages
)
"""The packages whose texts were compared with mlx-vlm's own computation, and are equal."""

BATCHED = frozenset(
    """
    aya_vision cohere_compass deepseek_vl_v2 deepseekocr deepseekocr_2 dots_ocr ernie4_5_moe_vl falcon_ocr fastvlm flint
    gemma3 glm4v glm4v_moe glm_ocr granite4_vision granite_vision hrm_text idefics2 idefics3 internvl internvl_chat
    k2_horizon kimi_k25 kimi_k3 kimi_vl lfm2_vl llava llava_bunny llava_next llava_onevision llmjpvl locateanything
    longcat_flash_sparse mage_vl mimo_v2 minicpmo minicpmv4_6 minicpmv4_7 minimax_m3 mistral3 mistral_large3 molmo2
    paddleocr_vl phi3_v phi4_siglip pixtral plamo2vl qwen2_5_vl qwen2_vl qwen3_omni_moe qwen3_vl qwen3_vl_moe smolvlm
    step3p7 xing4_0 youtu_vl
    """.split()  # noqa: SIM905  a name a line would fill pages
)
"""The packages whose answers may share a forward."""

DRAFTED = frozenset(
    """
    aya_vision cohere_compass deepseek_vl_v2 deepseekocr deepseekocr_2 dots_ocr ernie4_5_moe_vl falcon_ocr fastvlm flint
    gemma3 glm4v glm4v_moe glm_ocr granite4_vision granite_vision hrm_text idefics2 idefics3 internvl internvl_chat
    jina_vlm k2_horizon kimi_k25 kimi_k3 kimi_vl lfm2_vl limite llava llava_bunny llava_next llava_onevision llmjpvl
    locateanything longcat_flash_sparse mage_vl mimo_v2 minicpmo minicpmv4_6 minicpmv4_7 minimax_m3 mistral3
    mistral_large3 molmo2 paddleocr_vl phi3_v phi4_siglip pixtral plamo2vl qwen2_5_vl qwen2_vl qwen3_omni_moe qwen3_vl
    qwen3_vl_moe smolvlm step3p7 xing4_0 youtu_vl
    """.split()  # noqa: SIM905  a name a line would fill pages
)
"""The packages whose answers may be drafted."""

ALONE = frozenset(
    """
    deepseekocr deepseekocr_2 fastvlm granite4_vision jina_vlm llava_bunny minicpmv4_6 paddleocr_vl step3p7 zaya1_vl
    """.split()  # noqa: SIM905  a name a line would fill pages
)
"""Those of SEEING that take one picture a prompt."""

SEEING = frozenset(
    """
    aya_vision cohere_compass deepseek_vl_v2 deepseekocr deepseekocr_2 dots_ocr ernie4_5_moe_vl fastvlm gemma3 glm4v
    glm4v_moe glm5_next glm_ocr granite4_vision idefics2 idefics3 internvl internvl_chat jina_vlm kimi_k25 kimi_k3
    kimi_vl lfm2_vl llava llava_bunny llava_onevision locateanything mage_vl mimo_v2 minicpmo minicpmv4_6 minimax_m3_vl
    mistral3 molmo2 paddleocr_vl pixtral qwen2_5_vl qwen2_vl qwen3_omni_moe qwen3_vl qwen3_vl_moe qwen4_exp smolvlm
    step3p7 zaya1_vl
    """.split()  # noqa: SIM905  a name a line would fill pages
)
"""The packages whose pictures were compared with mlx-vlm's own computation, and give equal answers."""

BLIND: dict[str, str] = {
    "falcon_ocr": "tokens of a picture attend to each other",
    "granite_vision": "mlx-vlm puts picture features at other places than the processor states",
    "llama4": "mlx-vlm makes fewer parts of a picture than the prompt has places for",
    "llava_next": "mlx-vlm puts picture features at other places than the processor states",
    "llmjpvl": "mlx-vlm has no processor for it",
    "minicpmv4_7": "its pictures have positions on a common canvas",
    "phi3_v": "mlx-vlm drops the first token after a picture",
    "phi4_siglip": "its processor needs torchvision",
    "plamo2vl": "its tokenizer is Python code that comes with the model",
    "youtu_vl": "mlx-vlm has no processor for it",
}
"""Package that is served -> what keeps its pictures from being served."""

REFUSED: dict[str, str] = {
    "d1_omni": "it decides with its own output head, and no host asks for that yet",
    "deepseek_v4": "its answers depend on how a prompt is divided",
    "florence2": "it has an encoder besides its decoder",
    "gemma3n": "mlx-vlm scales the embeddings of answers, but not those of prompts",
    "got": "its processor wraps each prompt in a conversation of its own",
    "hunyuan_vl": "its answers depend on how a prompt is divided",
    "inkling": "mlx-vlm's module cannot be imported: No module named 'mlx_audio'",
    "mllama": "its answers depend on how a prompt is divided",
    "molmo": "mlx-vlm puts the picture before the whole prompt",
    "molmo_point": "its answers point into pictures that mlx-vlm keeps on the model",
    "moondream2": "mlx-vlm puts the picture before the whole prompt",
    "moondream3": "mlx-vlm puts the picture before the whole prompt",
    "multi_modality": "mlx-vlm's module cannot be imported: No module named 'cv2'",
    "nemotron_parse": "it has an encoder besides its decoder",
    "paligemma": "its answers depend on how a prompt is divided",
    "phi4mm": "mlx-vlm changes the weights for a picture and does not restore them",
    "unlimited_ocr": "its answers depend on how a prompt is divided",
}
"""Package -> what keeps it from being served."""
