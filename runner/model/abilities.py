"""What mlx-lm's modules allow, as trials found. `families.py` has the reasons of those that allow less.

Written by `python -m scripts.tools.models.abilities`. A module that is nowhere has not been tried.
"""

BATCHED = frozenset(
    """
    Klear afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear bailing_moe_v3 bitnet cohere cohere2
    cohere2_moe dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe
    falcon_h1 gear gemma gemma3 gemma3_text gemma3n gemma4 gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2
    gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid helium hunyuan hunyuan_v1_dense internlm2 internlm3
    iquestloopcoder jamba kimi_k25 kimi_k3 kimi_linear kimi_vl kolibri1 laguna lfm2 lfm2-vl lfm2_moe lille-130m llama
    llama4_text longcat_flash longcat_flash_ngram mamba mamba2 mellum mimo mimo_v2_flash minicpm minicpm3 minimax
    ministral3 mistral3 mistral4 mixtral muse_glimmer muse_spark nanbeige nanochat nemotron nemotron-nas nemotron_h
    olmo2 olmo3 olmo_hybrid olmoe openelm phi phi3 phimoe phixtral pixtral plamo plamo2 plamo3 prism_hadamard_qwen35
    qwen qwen2 qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe recurrent_gemma
    rwkv7 seed_oss smollm3 solar_open spark2_5 stablelm starcoder2 step3p5 talkie telechat3 youtu_llm
    """.split()  # noqa: SIM905  a name a line would fill pages
)
"""The modules whose answers may share a forward."""

DRAFTED = frozenset(
    """
    Klear afm7 afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear bailing_moe_v3 bitnet cohere
    cohere2 cohere2_moe dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5 ernie4_5_moe exaone exaone4
    exaone_moe falcon_h1 gear gemma gemma2 gemma3 gemma3_text gemma3n gemma4 gemma4_text glm glm4 glm4_moe glm4_moe_lite
    glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid helium hunyuan
    hunyuan_v1_dense internlm2 internlm3 iquestloopcoder jamba kimi_k25 kimi_k3 kimi_linear kimi_vl kolibri1 laguna lfm2
    lfm2-vl lfm2_moe lille-130m llama llama4 llama4_text longcat_flash longcat_flash_ngram mamba mamba2 mellum mimo
    mimo_v2_flash minicpm minicpm3 minimax minimax_m3_vl ministral3 mistral3 mistral4 mixtral muse_glimmer muse_spark
    nanbeige nanochat nemotron nemotron-nas nemotron_h olmo2 olmo3 olmo_hybrid olmoe openelm phi phi3 phimoe phixtral
    pixtral plamo plamo2 prism_hadamard_qwen35 qwen qwen2 qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe
    qwen3_next qwen3_vl qwen3_vl_moe recurrent_gemma rwkv7 seed_oss smollm3 solar_open spark2_5 stablelm starcoder2
    step3p5 talkie telechat3 youtu_llm
    """.split()  # noqa: SIM905  a name a line would fill pages
)
"""The modules whose answers may be drafted."""
