"""Chat templates for tests, built like those of known models, and a tokenizer with the special tokens they need."""

import small_models

HEAD = "{% for m in messages %}"
TOOLS = "{{ '\n\nTools:' }}{% for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}"
RESPONSE = "{% if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
CALLS = (
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    """{{ '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}"""
    "{{ '}\n</tool_call>' }}{% endfor %}"
)
CLOSE = "{% if loop.first and tools %}" + TOOLS + "{% endif %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
GENERATION = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

# As Qwen2.5's: all content is shown, that of earlier turns too.
KEEPS = HEAD + RESPONSE + "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}" + CALLS + CLOSE + GENERATION

_THOUGHT = "{% set parts = m.content.split('</think>') %}{% set rest = parts[-1].lstrip('\n') %}"
_SPLIT = RESPONSE + "{% elif m.role == 'assistant' %}" + _THOUGHT + "{{ '<|im_start|>assistant\n' }}"
_SHOWN = "{{ parts[0].rstrip('\n') + '\n</think>\n\n' }}{% endif %}{{ rest }}"
_REST = (
    CALLS.replace("m.content", "rest")
    + "{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    + CLOSE
)

LAST_USER = "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
# As Qwen3 Instruct's of July 2025, which does not think: UNTIL_USER without its switch.
THOUGHTLESS = (
    LAST_USER + HEAD + _SPLIT + "{% if parts|length > 1 and loop.index0 > ns.last %}" + _SHOWN + _REST + GENERATION
)
# As Qwen3's: thinking is shown as long as no user message follows, and can be switched off.
UNTIL_USER = THOUGHTLESS + "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
# Thinking is shown in the last turn only, and the generation prompt opens it.
STRIPS = HEAD + _SPLIT + "{% if parts|length > 1 and loop.last %}" + _SHOWN + _REST
STRIPS += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"

# As Llama 3.2's: a call is a separate message in bare JSON, an output is written as JSON, and the prompt has the date.
JSON_CALLS = (
    HEAD + "{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}"
    "{% if loop.first %}{{ 'Today: ' + strftime_now('%d %b %Y') + '\n\n' }}{% endif %}"
    "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    """{{ '{"name": "' + c.name + '", "parameters": ' }}{{ c.arguments | tojson }}{{ '}' }}"""
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}"
    "{% else %}{% if loop.index0 == 1 and tools %}" + TOOLS + "{{ '\n\n' }}{% endif %}{{ m.content }}{% endif %}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
WITHOUT_TOOLS = HEAD + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + GENERATION
WITHOUT_OUTPUTS = KEEPS.replace("m.content + '\n</tool_response>", "'\n</tool_response>")
OTHER_CALLS = KEEPS.replace("<tool_call>", "<call>").replace("</tool_call>", "</call>")
REFUSES = KEEPS.replace(RESPONSE, "{% if m.role == 'tool' %}{{ raise_exception('Only user and assistant roles!') }}")
REWRITES = KEEPS + "{{ '' if add_generation_prompt else messages|length }}"
MARKS_OLD = KEEPS.replace("'\n</tool_response>", "('' if loop.last else ' (old)') + '\n</tool_response>")

ALTERNATE = (
    HEAD
    + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% endfor %}"
)
# As Gemma 2's: no system message, roles alternate, and an end token that no other list has.
GEMMA_2 = (
    "{{ '<bos>' }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + ALTERNATE
) + (
    HEAD + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# As Mistral's first ones: a system message breaks the alternation of roles.
MISTRAL = (
    "{{ '<bos>' }}"
    + ALTERNATE
    + HEAD
    + (
        "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + '<eos>' }}"
        "{% endif %}{% endfor %}"
    )
)
# As Mistral's with tools: a special token begins a list of calls. Each call has an identifier, which its output repeats.
MISTRAL_TOOLS = (
    "{{ '<bos>' }}"
    + HEAD
    + (
        "{% if m.role == 'system' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% elif m.role == 'user' %}"
        "{% if tools %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
        "{{ '[INST] ' + m.content + ' [/INST]' }}{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
        "{% if not c.id or c.id | length != 9 %}{{ raise_exception('a call needs an id of 9 characters') }}{% endif %}"
        "{{ c.function | tojson }}{% endfor %}{{ ']<eos>' }}{% else %}{{ ' ' + m.content + '<eos>' }}{% endif %}{% endfor %}"
    )
)
# As Phi-3's: it drops messages of other roles than user and assistant, and raises no error.
PHI_3 = HEAD + (
    "{% if m.role in ('user', 'assistant') %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<eos>' }}{% endif %}"
)


def tokenizer(template=None):
    """Return the tokenizer of small_models.py with the special tokens of all templates."""
    made = small_models.tokenizer()
    made.add_tokens(["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], True)
    made.add_tokens(["<bos>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>"], True)
    made.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    made.chat_template = template
    return made
