"""Names of vLLM's parsers of tool calls, for checks without vLLM.

Source: `vllm/tool_parsers/__init__.py` of vLLM 0.23; a test compares them with the installed one.
"""

from __future__ import annotations

TOOL_PARSERS = (
    *("apertus", "cohere_command3", "cohere_command4", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4"),
    *("ernie45", "functiongemma", "gemma4", "gigachat3", "glm45", "glm47", "granite", "granite-20b-fc", "granite4"),
    *("hermes", "hunyuan_a13b", "hy_v3", "internlm", "jamba", "kimi_k2", "lfm2", "llama3_json", "llama4_json"),
    *("llama4_pythonic", "longcat", "mimo", "minicpm5", "minimax", "minimax_m2", "mistral", "olmo3", "openai"),
    *("phi4_mini_json", "poolside_v1", "pythonic", "qwen3_coder", "qwen3_xml", "seed_oss", "step3", "step3p5", "xlam"),
)
