"""Chat templates similar to those of model families, and tokenizers with these templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hone.models.tiny import character_tokenizer

GENERATE = "{% if add_generation_prompt %}"


@dataclass(frozen=True)
class Family:
    """A template, its special tokens, the end token of a turn, and the roles with mismatches."""

    template: str
    specials: tuple[str, ...]
    end: str
    roles: tuple[str, ...] = ("tool", "user")
    mismatches: tuple[str, ...] = ()
    """Roles before which the template drops the thinking of earlier turns."""


def _each(body: str) -> str:
    return "{% for m in messages %}" + body + "{% endfor %}"


QWEN_25 = Family(
    _each(
        "{% if m.role == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
        "{{ '<|im_start|>user' }}{% endif %}"
        "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
        "{{ '<|im_end|>\\n' }}{% endif %}"
        "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}"
    )
    + GENERATE
    + "{{ '<|im_start|>assistant\\n' }}{% endif %}",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
)
QWEN_3 = Family(
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + _each(
        "{% if m.role == 'assistant' %}{% set said = m.content %}"
        "{% if loop.index0 < ns.last and '</think>' in said %}"
        "{% set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
        "{{ '<|im_start|>assistant\\n' + said + '<|im_end|>\\n' }}"
        "{% elif m.role == 'tool' %}"
        "{{ '<|im_start|>user\\n<tool_response>\\n' + m.content"
        " + '\\n</tool_response><|im_end|>\\n' }}"
        "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}"
    )
    + GENERATE
    + "{{ '<|im_start|>assistant\\n' }}{% endif %}",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    mismatches=("user",),
)
LLAMA_3 = Family(
    "{{ '<|begin_of_text|>' }}"
    + _each(
        "{% set role = 'ipython' if m.role == 'tool' else m.role %}"
        "{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + m.content | trim"
        " + '<|eot_id|>' }}"
    )
    + GENERATE
    + "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|eot_id|>",
)
MISTRAL = Family(
    "{{ '<s>' }}"
    + _each(
        "{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
        "{% elif m.role == 'tool' %}"
        "{% if not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('no call before') }}{% endif %}"
        "{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
        "{% elif m.tool_calls %}{{ '[TOOL_CALLS]' + m.tool_calls | tojson + '</s>' }}"
        "{% else %}{{ m.content + '</s>' }}{% endif %}"
    ),
    ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"),
    "</s>",
    roles=("user",),
)
GEMMA = Family(
    "{{ '<bos>' }}"
    + _each(
        "{% if m.role == 'tool' %}{{ raise_exception('roles are user and model') }}{% endif %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n'"
        " + m.content | trim"
        " + '<end_of_turn>\\n' }}"
    )
    + GENERATE
    + "{{ '<start_of_turn>model\\n' }}{% endif %}",
    ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    "<end_of_turn>",
    roles=("user",),
)
DEEPSEEK_R1 = Family(
    "{{ '<｜begin｜>' }}"
    + _each(
        "{% if m.role == 'assistant' %}"
        "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end｜>' }}"
        "{% else %}{{ ('<｜Tool｜>' if m.role == 'tool' else '<｜User｜>') + m.content }}{% endif %}"
    )
    + GENERATE
    + "{{ '<｜Assistant｜>' }}{% endif %}",
    ("<｜begin｜>", "<｜User｜>", "<｜Assistant｜>", "<｜Tool｜>", "<｜end｜>"),
    "<｜end｜>",
    mismatches=("tool", "user"),
)
PHI_3 = Family(
    _each("{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}")
    + GENERATE
    + "{{ '<|assistant|>\\n' }}{% endif %}",
    ("<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"),
    "<|end|>",
)
ZEPHYR = Family(
    _each("{{ '<|' + m.role + '|>\\n' + m.content + '</s>\\n' }}")
    + GENERATE
    + "{{ '<|assistant|>\\n' }}{% endif %}",
    ("</s>",),
    "</s>",
)
GLM_4 = Family(
    "{{ '[gMASK]<sop>' }}"
    + _each("{{ '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\\n' + m.content }}")
    + GENERATE
    + "{{ '<|assistant|>\\n' }}{% endif %}",
    ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "",  # a turn ends with the next speaker's mark
)
GRANITE = Family(
    _each(
        "{{ '<|start_of_role|>' + ('tool_response' if m.role == 'tool' else m.role)"
        " + '<|end_of_role|>'"
        " + m.content + '<|end_of_text|>\\n' }}"
    )
    + GENERATE
    + "{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}",
    ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    "<|end_of_text|>",
)
GPT_OSS = Family(
    "{% set ns = namespace(name=none) %}"
    + _each(
        "{% if m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %}"
        "{{ '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary json<|message|>'"
        " + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
        "{% elif m.role == 'tool' %}"
        "{% if ns.name is none %}{{ raise_exception('no call before') }}{% endif %}"
        "{{ '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>'"
        " + m.content | tojson + '<|end|>' }}"
        "{% elif m.role == 'assistant' %}{% set ns.name = none %}"
        "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
        "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}"
    )
    + GENERATE
    + "{{ '<|start|>assistant' }}{% endif %}",
    ("<|start|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|end|>"),
    "<|end|>",
)
FAMILIES = {
    "qwen2.5": QWEN_25,
    "qwen3": QWEN_3,
    "llama3": LLAMA_3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "deepseek-r1": DEEPSEEK_R1,
    "phi3": PHI_3,
    "zephyr": ZEPHYR,
    "glm4": GLM_4,
    "granite": GRANITE,
}


def characters(family: Family) -> Any:
    """One token per character, and the family's special tokens."""
    return _with_template(character_tokenizer(), family)


def merges(family: Family) -> Any:
    """Byte pairs, so that text may be tokenised in several ways."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(
        [family.template, "the answer is and are you sure of it "] * 4, trainer
    )
    return _with_template(
        PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>"), family
    )


def _with_template(tokenizer: Any, family: Family) -> Any:
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.specials)})
    tokenizer.chat_template = family.template
    return tokenizer
