"""Chat templates in the formats of several families of models."""

FOR = "{%- for message in messages -%}"
BODY = """{{- %s }}
{%%- if message['role'] == 'assistant' -%%}<mark>{{- %s }}<end>{%%- else -%%}{{ %s }}{%%- endif -%%}
{%%- endfor -%%}"""
PROMPT = "{%%- if add_generation_prompt -%%}{{ %s }}{%%- endif -%%}"


def _body(header: str, others: str, assistant: str) -> str:
    """Return the body of the loop: the expressions of a message's beginning, and of its rest by role."""
    return BODY % (header, assistant, others)


_CHATML = "message['content'] + '<|im_end|>\\n'"
_LLAMA3 = "message['content'] | trim + '<eot>'"
_ZEPHYR = "message['content'] + eos_token + '\\n'"
_ALPACA = "message['content'] + '\\n\\n'"
_FORMATS = {
    "ChatML": FOR
    + _body("'<|im_start|>' + message['role'] + '\\n'", _CHATML, _CHATML)
    + PROMPT % "'<|im_start|>assistant\\n'",
    "Llama 3": "{{ '<begin>' }}"
    + FOR
    + _body("'<header>' + message['role'] + '</header>\\n\\n'", _LLAMA3, _LLAMA3)
    + PROMPT % "'<header>assistant</header>\\n\\n'",
    "Llama 2": """{%- set system = '' -%}{%- set turns = messages -%}
{%- if messages[0]['role'] == 'system' -%}
{%- set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- endif -%}
{%- for message in turns -%}
{%- set first = system if loop.first else '' -%}"""
    + _body(
        "(bos_token or '') + '[INST] ' if message['role'] == 'user' else ''",
        "(first + message['content']) | trim + ' [/INST]'",
        "' ' + message['content'] | trim + ' ' + eos_token",
    ),
    "Zephyr": FOR + _body("'<|' + message['role'] + '|>\\n'", _ZEPHYR, _ZEPHYR) + PROMPT % "'<|assistant|>\\n'",
    "Alpaca": FOR
    + _body("'### ' + ('Assistant' if message['role'] == 'assistant' else 'User') + ':\\n'", _ALPACA, _ALPACA)
    + PROMPT % "'### Assistant:\\n'",
}
# Formats without an end of the assistant's turn: it is written by the next message, or only between two messages.
_FORMATS |= {
    "Next": FOR
    + _body("'<|' + message['role'] + '|>'", "message['content']", "message['content']")
    + PROMPT % "'<|assistant|>'",
    "Separator": FOR
    + _body("('' if loop.first else '<|end|>') + message['role'] + ': '", "message['content']", "message['content']")
    + PROMPT % "'<|end|>assistant: '",
}
# A format that changes earlier turns, as Qwen3's does, and one with today's date, as Llama 3.2's.
_FORMATS["Thinking"] = (
    "{%- set last = namespace(user=0) -%}{%- for message in messages -%}{%- if message['role'] == 'user' -%}"
    "{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    + FOR
    + _body(
        "'<|im_start|>' + message['role'] + '\\n'",
        _CHATML,
        "('<think></think>' if loop.index0 > last.user else '') + " + _CHATML,
    )
    + PROMPT % "'<|im_start|>assistant\\n'"
)
_FORMATS["Opened"] = (  # the prompt begins a reasoning that no answer has
    FOR
    + _body("'<|im_start|>' + message['role'] + '\\n'", _CHATML, "'<think></think>' + " + _CHATML)
    + PROMPT % "'<|im_start|>assistant\\n<think>\\n'"
)
_FORMATS["Dated"] = "{{ 'Today is ' + strftime_now('%d %b %Y') + '.' }}" + _FORMATS["ChatML"]
ENDLESS = ("Alpaca", "Next", "Separator")  # formats after which the end-of-sequence token is added
# The same templates, without and with marks around the text that they add for an assistant's message.
TEMPLATES = {name: text.replace("<mark>", "").replace("<end>", "") for name, text in _FORMATS.items()}
MARKED = {
    name: text.replace("<mark>", "{%- generation -%}").replace("<end>", "{%- endgeneration -%}")
    for name, text in _FORMATS.items()
}
TEMPLATES |= {f"{name}, marked": text for name, text in MARKED.items()}
CHATML, LLAMA3 = TEMPLATES["ChatML"], TEMPLATES["Llama 3"]
QUESTIONS_MARKED = """{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
A>{% generation %}{{ message['content'] }}.{% endgeneration %}
{%- else -%}
Q: {{ message['content'] }}
{%- endif -%}
{%- endfor -%}"""

# Templates that do not fit some conversations.
COUNTING = """{{- messages | length }}
{%- for message in messages -%}{{ message['role'] + ': ' + message['content'] + '\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"""
STRICT = "{{ raise_exception('roles must alternate') }}"
TOOLS = "{%- if tools -%}{%- for tool in tools -%}{{ tool | tojson + '\n' }}{%- endfor -%}{%- endif -%}"
